"""The law that engines and layouts are held to: the same steps, taken by one process with textbook losses.

``check(recipe, world_size)`` compares losses, every gradient, the norm, expert counts and the updated weights.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from moe_zoo.comm.mesh import Mesh
from moe_zoo.engines import MicroBatch, make_engine
from moe_zoo.layers.router import TopKRouter
from moe_zoo.models.decoder import SparseDecoder
from moe_zoo.models.init import initialize
from moe_zoo.ops import reference
from moe_zoo.ops.documents import unpack_rows
from moe_zoo.ops.noise import uniform_noise
from moe_zoo.parallel.build import build_model
from moe_zoo.spec.layout import resolve_layout
from moe_zoo.spec.recipe import Recipe
from moe_zoo.testing import run_distributed

BOS, SEQ, STEPS, SEED = 1, 12, 3, 3
TOLERANCE = 1e-5


def make_recipe(**changes) -> Recipe:
    model = {
        "vocab_size": 29,
        "d_model": 16,
        "num_layers": 2,
        "init_std": 0.3,
        "attention": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "qk_norm": True},
        "feed_forward": {"d_ff": 20, "activation": "silu", "gated": True},
        "moe": {
            "router": {"num_experts": 6, "top_k": 2, "jitter": 0.1},
            "experts": {"d_ff": 12, "activation": "gelu", "gated": True},
            "shared": {"d_ff": 8, "activation": "relu", "gated": False},
        },
    }
    values = {
        "name": "law",
        "model": model,
        "data": {"path": "none", "tokenizer": "none", "seq_len": SEQ},
        "train": {"steps": STEPS, "global_batch": 8, "micro_batches": 2},
        # eps: below it Adam would turn rounding noise into whole steps
        "optim": {"lr": 1e-2, "eps": 1e-5, "clip": 0.5, "schedule": "constant"},
        "balance": {"aux_coefficient": 0.3, "z_coefficient": 0.01, "scope": "micro_batch"},
        "log": {"wandb": "off"},
    }
    for path, value in changes.items():
        *folders, last = path.split("__")
        target = values
        for folder in folders:
            target = target.setdefault(folder, {})
        target[last] = value
    return Recipe.from_dict(values)


def batches(recipe: Recipe) -> torch.Tensor:
    """(steps, rows, seq + 1) tokens; documents make ragged targets."""
    generator = torch.Generator().manual_seed(5)
    shape = (STEPS, recipe.train.global_batch, recipe.data.seq_len + 1)
    tokens = torch.randint(2, 29, shape, generator=generator)
    return tokens.masked_fill(torch.rand(shape, generator=generator) < 0.15, BOS)


def seeds(step: int, rows: int) -> torch.Tensor:
    return torch.arange(rows) + 100 * step


def starve_experts(weight: torch.Tensor) -> None:
    """Experts 4 and up get no token: of u, -u, v, -v two logits are always above their zero."""
    weight[1], weight[3], weight[4:] = -weight[0], -weight[2], 0.0


def routers(model: SparseDecoder) -> list[TopKRouter]:
    return [module for module in model.modules() if isinstance(module, TopKRouter)]


def oracle(recipe: Recipe) -> list[dict]:
    """One process, whole model, whole batch, textbook losses."""
    model = initialize(SparseDecoder(recipe.model).train(), SEED)
    with torch.no_grad():
        for router in routers(model):
            starve_experts(router.weight)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    spec = recipe.optim
    groups = [{"params": decay, "weight_decay": spec.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps)
    records = []
    for step, tokens in enumerate(batches(recipe)):
        loss, balance, counts, seen = textbook_loss(recipe, model, tokens, seeds(step, len(tokens)))
        optimizer.zero_grad()
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), spec.clip)
        optimizer.step()
        move_bias(recipe, model, counts)
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        records.append({"balance": balance, "norm": norm.item(), "grads": grads, "weights": weights, "counts": counts})
        records[-1] |= {"loss": loss.item()} | seen
    return records


def textbook_loss(recipe: Recipe, model: SparseDecoder, tokens: torch.Tensor, row_seeds: torch.Tensor):
    probs, chosen, logits_z, hooks, dropped = [], [], [], [], []

    def look(router, inputs, routing):
        hidden, seeds = inputs
        noise = 1.0
        if router.jitter:
            noise = (
                1
                - router.jitter
                + 2
                * router.jitter
                * uniform_noise(seeds, torch.arange(hidden.shape[1]), hidden.shape[2], salt=router.layer)
            )
        logits = ((hidden * noise) @ router.weight.t()).flatten(0, 1)
        scores = logits.softmax(-1) if router.score == "softmax" else logits.sigmoid()
        bias = 0 if router.selection_bias is None else router.selection_bias
        probs.append(scores / scores.sum(-1, keepdim=True))
        chosen.append((scores + bias).topk(router.top_k).indices)
        logits_z.append(logits.logsumexp(-1).square().mean())
        dropped.append((routing.experts_TK == router.num_experts).double().mean())

    for router in routers(model):
        hooks.append(router.register_forward_hook(look))
    rows = unpack_rows(tokens, BOS)
    logits = model(rows.input_ids, rows.positions, rows.mask, row_seeds).logits
    for hook in hooks:
        hook.remove()
    token = F.cross_entropy(logits.flatten(0, 1), rows.targets.flatten(), ignore_index=-100)
    if not probs:
        return token, 0.0, None, {}
    scope, train = recipe.balance.scope, recipe.train
    pools = {"sequence": train.global_batch, "micro_batch": train.micro_batches, "global_batch": 1}[scope]
    balance = reference.balance_loss(torch.stack(probs), torch.stack(chosen), pools)
    counts = torch.stack([torch.bincount(c.flatten(), minlength=recipe.model.num_experts) for c in chosen])
    aux = recipe.balance.aux_coefficient if recipe.balance.method == "aux_loss" else 0.0
    z = torch.stack(logits_z).mean()
    entropy = [-(p * p.log()).sum(-1).mean().double().detach() for p in probs]
    seen = {"entropy": torch.stack(entropy), "dropped": torch.stack(dropped)}
    return token + aux * balance + recipe.balance.z_coefficient * z, balance.item(), counts, seen


def move_bias(recipe: Recipe, model: SparseDecoder, counts: torch.Tensor) -> None:
    if recipe.balance.method != "bias":
        return
    for router, count in zip(routers(model), counts.float(), strict=True):
        router.selection_bias += recipe.balance.bias_update_rate * (count.mean() - count).sign()


def many_ranks(recipe: Recipe, truth: list[dict]) -> None:
    """The same steps by an engine on every rank; what it has is compared where it has it."""
    world = dist.get_world_size()
    mesh = Mesh(resolve_layout(recipe, world, world), torch.device("cpu"))
    placed = build_model(recipe, mesh, SEED)
    with torch.no_grad():
        for router in routers(placed.module):
            starve_experts(router.weight)
    engine = make_engine(placed, mesh, recipe)
    for step, (tokens, true) in enumerate(zip(batches(recipe), truth, strict=True)):
        scale, parts, stats = engine.backward(own_part(recipe, mesh, tokens, seeds(step, len(tokens))))
        compare(engine, engine.gradient, true["grads"], "gradient")
        summary = engine._summary(scale, parts, stats, engine.update(recipe.optim.lr))
        aux = recipe.balance.aux_coefficient if recipe.balance.method == "aux_loss" else 0.0
        total = summary.loss + aux * summary.balance + recipe.balance.z_coefficient * summary.z
        assert abs(total - true["loss"]) < TOLERANCE, (total, true["loss"])
        assert abs(summary.balance - true["balance"]) < TOLERANCE, (summary.balance, true["balance"])
        assert abs(summary.grad_norm - true["norm"]) < TOLERANCE, (summary.grad_norm, true["norm"])
        assert (summary.counts_LE is None) == (true["counts"] is None)
        if true["counts"] is not None:
            assert torch.equal(summary.counts_LE.long(), true["counts"])
            torch.testing.assert_close(summary.entropy_L, true["entropy"], rtol=0, atol=TOLERANCE)
            torch.testing.assert_close(summary.dropped_L, true["dropped"], rtol=0, atol=TOLERANCE)
        compare(engine, engine.weight, true["weights"], "weight")


def own_part(recipe: Recipe, mesh: Mesh, tokens: torch.Tensor, row_seeds: torch.Tensor) -> list[MicroBatch]:
    pick = [t.unflatten(0, (recipe.train.micro_batches, mesh.dp, -1))[:, mesh.dp_rank] for t in (tokens, row_seeds)]
    return [MicroBatch(unpack_rows(rows, BOS), ids) for rows, ids in zip(*pick, strict=True)]


def compare(engine, read, whole: dict[str, torch.Tensor], what: str) -> None:
    for name, placement in engine.placements.items():
        expected = placement.take(whole[placement.name])
        torch.testing.assert_close(
            read(name).view_as(expected), expected, rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{what} {n}: {m}"
        )


def check(recipe: Recipe, world_size: int, starved: bool = True) -> None:
    truth = oracle(recipe)
    assert all(record["norm"] > recipe.optim.clip for record in truth), "clipping must be active"
    if starved:
        assert truth[0]["counts"][:, 4:].eq(0).all(), "the last experts must get no token"
    run_distributed(many_ranks, recipe, truth, world_size=world_size)
