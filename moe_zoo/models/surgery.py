"""Change the experts of a model: from dense to sparse, and more, fewer, narrower or merged ones.

Where mathematics allows, the function of the model stays what it was; each docstring says where. Letters: L sparse
layers, E experts, D width, F expert width, G parts.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moe_zoo.models.decoder import SparseDecoder
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.errors import MoeZooError
from moe_zoo.spec.feed_forward import FeedForwardSpec, MoESpec, RouterSpec

Tensors = dict[str, Tensor]
SMOOTHING = 1e-9  # an expert that nobody used still has a weight in a mean


def upcycle(
    model: SparseDecoder,
    num_experts: int,
    top_k: int,
    *,
    granularity: int = 1,
    every: int = 1,
    first: int = 0,
    seed: int,
) -> SparseDecoder:
    """Every expert a copy of the layer's dense feed-forward, or with ``granularity`` G a G-th of one.

    The function stays: weights of the chosen sum to one, and a token that visits one part of a copy visits all of it,
    as the router's rows of these parts begin equal. Sources: arXiv:2212.05055; for parts, arXiv:2410.07524, section 3.
    """
    arch, G = model.architecture, granularity
    _check_upcycling(arch, num_experts, top_k, G)
    dense = arch.feed_forward
    router = RouterSpec(num_experts=num_experts, top_k=top_k, normalize=True)
    moe = MoESpec(router=router, experts=replace(dense, d_ff=dense.d_ff // G), first_layer=first, every=every)
    made = replace(arch, moe=moe)
    tensors = dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for layer in made.sparse_layers:
        path = f"layers.{layer}.feed_forward."
        whole = _stacked(tensors, path, dense)
        parts = _split_stack(whole, G, dense.gated, factor=G)
        rows = torch.empty(num_experts // G, arch.d_model).normal_(std=arch.init_std, generator=generator)
        tensors[path + "router.weight"] = rows.repeat_interleave(G, 0).to(whole["w_up"].dtype)
        tensors |= {f"{path}experts.{name}": torch.cat([part] * (num_experts // G)) for name, part in parts.items()}
    return rebuilt(model, made, tensors)


def split_experts(model: SparseDecoder, parts: int) -> SparseDecoder:
    """Each expert becomes ``parts`` narrower ones, and a token visits as many times more.

    The function stays where no token is dropped: the parts of an expert share its router row, so they are chosen
    together. Refused where they would change each other's weight or the groups' ranks.
    """
    arch, moe = model.architecture, _moe(model)
    if parts < 1 or moe.experts.d_ff % parts:
        raise MoeZooError(
            f"split-experts: parts {parts}; must divide the experts' width {moe.experts.d_ff}; try another number"
        )
    _check_copies(moe.router, "split-experts", moe.router.top_k * parts)
    factor = parts if _shares_weight(moe.router) else 1
    router = replace(moe.router, num_experts=moe.router.num_experts * parts, top_k=moe.router.top_k * parts)
    made = replace(arch, moe=replace(moe, router=router, experts=replace(moe.experts, d_ff=moe.experts.d_ff // parts)))

    def edit(layer: Tensors) -> Tensors:
        stacks = {name.removeprefix("experts."): them for name, them in layer.items() if name.startswith("experts.")}
        split = _split_stack(stacks, parts, moe.experts.gated, factor)
        rows = _repeated(moe.router, {n: them for n, them in layer.items() if n.startswith("router.")}, parts)
        return rows | {f"experts.{name}": stack for name, stack in split.items()}

    return rebuilt(model, made, _edited(model, lambda _, layer: edit(layer)))


def grow_experts(model: SparseDecoder, copies: int, *, top_k: int | None = None) -> SparseDecoder:
    """Each expert ``copies`` times. By default a token visits all copies of what it visited: the function stays
    where no token is dropped. Where it was 1, ``top_k`` 1 keeps it too, unless the weights share a sum of which they keep
    their part; elsewhere it changes.
    """
    arch, moe = model.architecture, _moe(model)
    _check_copies(moe.router, "grow-experts", top_k or moe.router.top_k * copies)
    visits_all = top_k is None or top_k == moe.router.top_k * copies
    factor = 1 / copies if visits_all and not _shares_weight(moe.router) else 1.0
    router = replace(moe.router, num_experts=moe.router.num_experts * copies, top_k=top_k or moe.router.top_k * copies)

    def edit(layer: Tensors) -> Tensors:
        grown = _repeated(moe.router, layer, copies)
        return grown | {name: grown[name] * factor for name in ("experts.w_down", "experts.down_bias") if name in grown}

    made = replace(arch, moe=replace(moe, router=router))
    return rebuilt(model, made, _edited(model, lambda _, layer: edit(layer)))


def prune_experts(model: SparseDecoder, keep: list[list[int]], top_k: int | None = None) -> SparseDecoder:
    """Only the experts that ``keep`` lists, per sparse layer and equally many. Those that no token chose are not missed.

    With softmax scores that are not normalised, the probability of what is gone goes to those that stay.
    """
    arch, moe = model.architecture, _moe(model)
    sizes = {len(set(kept) & set(range(moe.router.num_experts))) for kept in keep} | {len(kept) for kept in keep}
    if len(keep) != len(arch.sparse_layers) or len(sizes) != 1 or moe.router.num_groups > 1:
        raise MoeZooError(
            f"prune-experts: {len(keep)} lists of {sorted(sizes)} experts, {moe.router.num_groups} groups; every sparse "
            f"layer keeps equally many, and experts in groups stay together; give one list per sparse layer"
        )
    router = replace(moe.router, num_experts=sizes.pop(), top_k=top_k or moe.router.top_k)
    made = replace(arch, moe=replace(moe, router=router))
    return rebuilt(
        model,
        made,
        _edited(model, lambda at, layer: {name: values[sorted(keep[at])] for name, values in layer.items()}),
    )


def merge_experts(model: SparseDecoder, size: int, usage: Tensor, top_k: int | None = None) -> SparseDecoder:
    """Each ``size`` alike experts become their mean, weighted by ``usage`` (L, E), tokens that chose each.

    Alike are those whose router rows point the same way as that of a much used one. The function stays where what is
    merged was equal, weights are normalised, and ``top_k`` is lowered by as much. Source: M-SMoE, arXiv:2310.01334, section 3.
    """
    arch, moe = model.architecture, _moe(model)
    E = moe.router.num_experts
    if E % size or moe.router.num_groups > 1:
        raise MoeZooError(
            f"merge-experts: size {size}; must divide {E} experts that are in no groups (there are "
            f"{moe.router.num_groups}); try another size"
        )
    kept = min(top_k or moe.router.top_k, E // size)
    made = replace(arch, moe=replace(moe, router=replace(moe.router, num_experts=E // size, top_k=kept)))

    def edit(at: int, layer: Tensors) -> Tensors:
        members = _alike(layer["router.weight"], usage[at], size)
        shares = (usage[at] + SMOOTHING)[members]
        shares = shares / shares.sum(-1, keepdim=True)
        return {name: _weighted_mean(values, members, shares) for name, values in layer.items()}

    return rebuilt(model, made, _edited(model, edit))


@torch.no_grad()
def measure_usage(model: SparseDecoder, ids: Tensor) -> Tensor:
    """(L, E) tokens of ``ids`` (batch, seq) that chose each expert."""
    _moe(model)
    return model(ids).stats.counts.sum(1)


@torch.no_grad()
def largest_change(before: SparseDecoder, after: SparseDecoder, rows: int = 2, seq_len: int = 32) -> float:
    """Of the logits of random tokens, over the largest logit."""
    ids = torch.randint(before.architecture.vocab_size, (rows, seq_len), generator=torch.Generator().manual_seed(0))
    was, now = (model.eval()(ids).logits.float() for model in (before, after))
    return ((now - was).abs().max() / was.abs().max()).item()


def rebuilt(model: SparseDecoder, architecture: Architecture, tensors: Tensors) -> SparseDecoder:
    """A model of another architecture from the tensors that fit it."""
    with torch.device("meta"):
        made = SparseDecoder(architecture)
    made.load_state_dict({name: tensors[name].contiguous() for name in made.state_dict()}, assign=True)
    if architecture.tie_embeddings:
        made.head.weight = made.embed.weight
    return made.train(model.training)


def _edited(model: SparseDecoder, edit: Callable[[int, Tensors], Tensors]) -> Tensors:
    """All tensors of a model, with those of each sparse layer's router and experts as ``edit(which, them)`` gives."""
    tensors = dict(model.state_dict())
    for at, layer in enumerate(model.architecture.sparse_layers):
        path = f"layers.{layer}.feed_forward."
        names = [name for name in tensors if name.startswith((path + "router.", path + "experts."))]
        own = {name.removeprefix(path): tensors[name] for name in names}
        tensors |= {path + name: values for name, values in edit(at, own).items()}
    return tensors


def _stacked(tensors: Tensors, path: str, dense: FeedForwardSpec) -> Tensors:
    """A dense feed-forward as a stack of one expert."""
    names = ("gate", "up") if dense.gated else ("up",)
    w_up = torch.cat([tensors[f"{path}{name}.weight"].t() for name in names], dim=-1)
    stack = {"w_up": w_up[None], "w_down": tensors[f"{path}down.weight"].t()[None]}
    if dense.bias:
        up_bias = torch.cat([tensors[f"{path}{name}.bias"] for name in names])
        stack |= {"up_bias": up_bias[None], "down_bias": tensors[f"{path}down.bias"][None]}
    return stack


def _split_stack(stacks: Tensors, parts: int, gated: bool, factor: float) -> Tensors:
    """(E, D, F) and (E, F, D) -> (E parts, D, F / parts) and (E parts, F / parts, D), what leaves times ``factor``."""
    up_EDbGF = stacks["w_up"].unflatten(-1, (1 + gated, parts, -1))
    split = {
        "w_up": up_EDbGF.permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1),
        "w_down": stacks["w_down"].unflatten(1, (parts, -1)).flatten(0, 1) * factor,
    }
    if "up_bias" in stacks:
        up_EbGF = stacks["up_bias"].unflatten(-1, (1 + gated, parts, -1))
        split["up_bias"] = up_EbGF.transpose(1, 2).flatten(2).flatten(0, 1)
        split["down_bias"] = stacks["down_bias"].repeat_interleave(parts, 0) * (
            factor / parts
        )  # each part adds its share
    return split


def _alike(rows_ED: Tensor, used_E: Tensor, size: int) -> Tensor:
    """(E / size, size) indices: the most used expert that is left, and those nearest to it."""
    unit = torch.nn.functional.normalize(rows_ED.float(), dim=-1)
    similarity, left, groups = unit @ unit.t(), set(range(len(rows_ED))), []
    while left:
        centre = max(left, key=lambda e: (used_E[e].item(), -e))
        nearest = sorted(left - {centre}, key=lambda e: (-similarity[centre, e].item(), e))[: size - 1]
        groups.append([centre, *nearest])
        left -= set(groups[-1])
    return torch.tensor(groups)


def _weighted_mean(values: Tensor, members: Tensor, shares: Tensor) -> Tensor:
    wide = values.float()[members]  # (groups, size, ...)
    return (wide * shares.view(*shares.shape, *[1] * (wide.dim() - 2))).sum(1).to(values.dtype)


def _shares_weight(router: RouterSpec) -> bool:
    """Whether twice the experts with the same rows means half the weight for each."""
    return router.normalize or router.score == "softmax"


def _moe(model: SparseDecoder) -> MoESpec:
    if model.architecture.encoder is not None:
        raise MoeZooError("experts: the model has an encoder; surgery is done on decoders alone; give one")
    if model.architecture.moe is None:
        raise MoeZooError("experts: the model is dense; there is nothing to change; moe-zoo upcycle makes it sparse")
    if model.architecture.shortcut or model.architecture.num_scored > model.architecture.num_experts:
        raise MoeZooError(
            "experts: the model has blocks with a shortcut, or experts without weights; surgery of such is not built; "
            "choose another model"
        )
    return model.architecture.moe


def _repeated(router: RouterSpec, layer: Tensors, times: int) -> Tensors:
    """Each expert's entries ``times`` times. A softmax gives each copy a part of the score, and its bias follows."""
    made = {name: values.repeat_interleave(times, 0) for name, values in layer.items()}
    if "router.selection_bias" in made and router.score == "softmax":
        made["router.selection_bias"] = made["router.selection_bias"] / times
    return made


def _check_copies(router: RouterSpec, verb: str, top_k: int) -> None:
    """Refuse routers under which copies of an expert do not do what it did."""
    if router.score == "sparsemixer":
        raise MoeZooError(
            f"{verb}: router.score sparsemixer; a choice is weighed against the experts near it, of which a copy would be "
            f"one; no remedy is known"
        )
    if router.scales_input and top_k > 1:
        raise MoeZooError(
            f"{verb}: router.scales_input true; an expert is given the scaled token, and a token visits one alone; "
            f"grow-experts --top-k 1 copies experts and visits one"
        )
    if router.num_groups > 1 and router.group_score == "top2":
        raise MoeZooError(
            f"{verb}: router.group_score top2; both best experts of a group would be parts or copies of one, and other "
            f"groups would win; no remedy is known"
        )


def _check_upcycling(arch: Architecture, num_experts: int, top_k: int, granularity: int) -> None:
    if arch.encoder is not None:
        raise MoeZooError("upcycle: the model has an encoder; surgery is done on decoders alone; give one")
    if arch.moe is not None:
        raise MoeZooError(
            "upcycle: the model is sparse already; split-experts and grow-experts change it; give a dense one"
        )
    for name, value in (
        ("--experts", num_experts),
        ("--top-k", top_k),
        ("the feed-forward width", arch.feed_forward.d_ff),
    ):
        if value % granularity:
            raise MoeZooError(
                f"upcycle: {name}: {value}; a multiple of granularity = {granularity} keeps the parts of a copy together; "
                f"try {-(-value // granularity) * granularity}"
            )
