"""The steps of one process: whole model, whole batch, textbook losses, torch's plain AdamW. No engine, no ranks.

A record maps quantity -> name -> value: ``record["gradient"]["embed.weight"]``. Letters: T tokens, E experts,
K choices, N tokens or slots.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_zoo.certify.choice import choose
from moe_zoo.certify.problem import BOS, Problem, leave_experts_idle, routers, step_rows
from moe_zoo.layers.router import Routing, TopKRouter
from moe_zoo.models.init import initialize
from moe_zoo.models.switch import Network, make_network
from moe_zoo.ops import reference
from moe_zoo.ops.documents import unpack_rows
from moe_zoo.ops.noise import uniform_noise
from moe_zoo.spec.recipe import Recipe

Record = dict[str, dict[str, Tensor]]


class Seen(NamedTuple):
    """What a router did with a batch."""

    probs_TE: Tensor
    chosen_NK: Tensor  # a row per token; where experts choose, a row per slot
    squared_z: Tensor
    dropped: Tensor  # share of slots
    gap: Tensor  # smallest distance between the last score chosen and the first that was not


def textbook_steps(problem: Problem, dtype: torch.dtype = torch.float32) -> list[Record]:
    """A record per step of the recipe."""
    recipe = problem.recipe
    model = initialize(make_network(recipe.model).train(), recipe.train.seed)
    leave_experts_idle(model, problem.num_idle)
    model.to(dtype)
    optimizer = _adamw(model, recipe)
    return [_step(recipe, model, optimizer, step) for step in range(recipe.train.steps)]


def _step(recipe: Recipe, model: Network, optimizer: torch.optim.AdamW, step: int) -> Record:
    loss, record = _loss(recipe, model, *step_rows(recipe, step))
    optimizer.zero_grad()
    loss.backward()
    named = dict(model.named_parameters())
    record["gradient"] = {name: param.grad.clone() for name, param in named.items()}
    norm = torch.cat([param.grad.flatten() for param in named.values()]).norm()
    record["norm"] = {"": norm}
    if recipe.optim.clip:
        for param in named.values():
            param.grad *= (recipe.optim.clip / (norm + 1e-6)).clamp(max=1.0)
    optimizer.step()
    if recipe.balance.method == "bias":
        _move_biases(model, record["counts"], recipe.balance.bias_update_rate)
    record["weight"] = {name: param.detach().clone() for name, param in named.items()}
    for key in ("exp_avg", "exp_avg_sq"):
        record[key] = {name: optimizer.state[param][key].clone() for name, param in named.items()}
    record["bias"] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return record


def _adamw(model: Network, recipe: Recipe) -> torch.optim.AdamW:
    spec, named = recipe.optim, dict(model.named_parameters())
    vectors = [name for name, param in named.items() if param.ndim == 1 or name.endswith("bias")]  # an expert's too
    groups = [
        {"params": [param for name, param in named.items() if name not in vectors], "weight_decay": spec.weight_decay},
        {"params": [named[name] for name in vectors], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps)


def _loss(recipe: Recipe, model: Network, tokens: Tensor, seeds: Tensor) -> tuple[Tensor, Record]:
    rows = unpack_rows(tokens, BOS, recipe.data.encoder_len)
    with _watched(model) as seen:
        logits = model(rows.ids, rows.positions, rows.mask, seeds).logits
    token = F.cross_entropy(logits.flatten(0, 1), rows.targets.flatten(), ignore_index=-100)
    record = {"loss": {"": token.detach()}}
    if not seen:
        return token, record
    balance, z = _balance(recipe, seen), torch.stack([layer.squared_z for layer in seen]).mean()
    record |= {"balance": {"": balance.detach()}, "z": {"": z.detach()}} | _routing(recipe, seen)
    aux = recipe.balance.aux_coefficient if recipe.balance.method == "aux_loss" else 0.0
    return token + aux * balance + recipe.balance.z_coefficient * z, record


def _balance(recipe: Recipe, seen: list[Seen]) -> Tensor:
    train = recipe.train
    pools = {"sequence": train.global_batch, "micro_batch": train.micro_batches, "global_batch": 1}
    # Layer by layer: those of an encoder and those of a decoder see different numbers of tokens.
    num_pools = pools[recipe.balance.scope]
    return torch.stack([reference.balance_loss(s.probs_TE[None], s.chosen_NK[None], num_pools) for s in seen]).mean()


def _routing(recipe: Recipe, seen: list[Seen]) -> Record:
    experts = recipe.model.num_scored
    names = [f"layer {layer}" for layer in recipe.model.sparse_layers]
    values = {
        "counts": [torch.bincount(s.chosen_NK.flatten(), minlength=experts) for s in seen],
        "entropy": [-(s.probs_TE * s.probs_TE.log()).sum(-1).mean().detach() for s in seen],
        "dropped": [s.dropped for s in seen],
        "gap": [s.gap for s in seen],
    }
    return {quantity: dict(zip(names, layers, strict=True)) for quantity, layers in values.items()}


@contextmanager
def _watched(model: Network) -> Iterator[list[Seen]]:
    """What every router does, computed again from its input."""
    seen: list[Seen] = []
    hooks = [router.register_forward_hook(lambda *call: seen.append(_look(*call))) for router in routers(model)]
    yield seen
    for hook in hooks:
        hook.remove()


def _look(router: TopKRouter, inputs: tuple[Tensor, Tensor], routing: Routing) -> Seen:
    hidden, seeds = inputs
    if router.jitter:
        noise = uniform_noise(seeds, torch.arange(hidden.shape[1]), hidden.shape[2], salt=router.layer)
        hidden = hidden * (1 - router.jitter + 2 * router.jitter * noise)
    logits = (hidden @ router.weight.t()).flatten(0, 1)
    if router.bias is not None:
        logits = logits + router.bias
    scores = logits.sigmoid() if router.score == "sigmoid" else logits.softmax(-1)
    chosen, gap = choose(router, scores.detach(), len(hidden))
    return Seen(
        probs_TE=scores / scores.sum(-1, keepdim=True),
        chosen_NK=chosen,
        squared_z=logits.logsumexp(-1).square().mean(),
        dropped=_share_dropped(router, routing, chosen, len(scores)),
        gap=gap,
    )


def _share_dropped(router: TopKRouter, routing: Routing, chosen_NK: Tensor, num_tokens: int) -> Tensor:
    """Of slots; where experts choose, of tokens. Who chose an expert without weights travels nowhere and was not dropped."""
    if routing.tokens_N is not None:
        return torch.tensor(1 - len(routing.tokens_N.unique()) / num_tokens, dtype=torch.float64)
    stays, chose_to = (routing.experts_TK == router.num_experts).sum(), (chosen_NK >= router.num_experts).sum()
    return (stays - chose_to).double() / chosen_NK.numel()


def _move_biases(model: Network, counts: dict[str, Tensor], rate: float) -> None:
    """Up where an expert got less than the mean. Source: arXiv:2408.15664, algorithm 1."""
    for router, count in zip(routers(model), counts.values(), strict=True):
        count = count.to(router.selection_bias.dtype)
        has_weights = torch.arange(len(count)) < router.num_experts
        router.selection_bias += rate * (count.mean() - count).sign() * has_weights
