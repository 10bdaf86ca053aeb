"""All experts of a layer as one function of stacked weights: two fast paths; the slow twin is ``ops.reference``.

Slots are sorted by expert; an expert then works on a contiguous range of rows. A slot whose expert is E (one past the
last) was dropped: it sorts behind all others and contributes nothing.

Letters: T tokens, D width, F expert width, E experts, K choices per token, N = T*K slots, P places per expert.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


def expert_ffn(
    x_TD: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    *,
    activation: str,
    gated: bool,
) -> Tensor:
    """``sum_k weights[t, k] * FFN_{experts[t, k]}(x[t])``, shape (T, D). ``weights_TK`` None means ones.

    ``w_up`` is (E, D, F), or (E, D, 2F) with the gate first if ``gated``; ``w_down`` is (E, F, D).
    """
    if weights_TK is None:
        weights_TK = torch.ones_like(experts_TK, dtype=x_TD.dtype)
    path = _grouped_experts if _suits_grouped_mm(x_TD, w_up, w_down) else LoopedExperts.apply
    return path(x_TD, experts_TK, weights_TK, w_up, w_down, activation, gated)


def batched_ffn(x_EPD: Tensor, w_up: Tensor, w_down: Tensor, *, activation: str, gated: bool) -> Tensor:
    """Each expert on its own places. Static shapes and no host sync, at the cost of the places that are empty."""
    act_EPF, _, _ = _activate(torch.bmm(x_EPD, w_up), activation, gated)
    return torch.bmm(act_EPF, w_down)


def _suits_grouped_mm(*tensors: Tensor) -> bool:
    """What torch's kernel takes: bf16 on a GPU, rows of a multiple of 16 bytes."""
    return all(t.is_cuda and t.dtype == torch.bfloat16 and t.shape[-1] % 8 == 0 for t in tensors)


def host_counts(counts: Tensor) -> list[int]:
    """The one place where the size of an expert's work reaches the host (and where a dry run answers instead)."""
    return counts.tolist()


def sort_slots(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Slots ordered by expert, dropped ones last, (N,), and accepted slots per expert, (E,), both int64."""
    flat_N = experts_TK.flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat_N.device)
    counts.scatter_add_(0, flat_N, torch.ones_like(flat_N))
    return flat_N.argsort(stable=True), counts[:num_experts]


def inverse_permutation(order_N: Tensor) -> Tensor:
    """``inverse[order[i]] = i``."""
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return inverse_N


class LoopedExperts(torch.autograd.Function):
    """One pass per expert, rows in cache from gather to down-projection: the fast path on a CPU.

    Saves the input, the pre-activation, the permutation and the weights, nothing of size (N, D). The router's
    gradient is ``<d_act, act>``, so no expert output is kept or recomputed. Source: SonicMoE, arXiv:2512.14080,
    section 3.
    """

    @staticmethod
    def forward(ctx, x_TD, experts_TK, weights_TK, w_up, w_down, activation, gated):
        K = experts_TK.shape[1]
        order_N, counts_E = sort_slots(experts_TK, len(w_up))
        tokens_N, counts = order_N // K, host_counts(counts_E)
        gains_N1 = weights_TK.reshape(-1, 1).index_select(0, order_N).to(x_TD.dtype)
        pre_NF = x_TD.new_empty(len(order_N), w_up.shape[2])
        out_ND = x_TD.new_empty(len(order_N), x_TD.shape[1])
        out_ND[sum(counts) :] = 0
        for e, rows in _ranges(counts):
            torch.mm(x_TD.index_select(0, tokens_N[rows]), w_up[e], out=pre_NF[rows])
            act, _, _ = _activate(pre_NF[rows], activation, gated)
            torch.mm(act.mul_(gains_N1[rows]), w_down[e], out=out_ND[rows])
        place_TK = inverse_permutation(order_N).view_as(experts_TK)
        ctx.save_for_backward(x_TD, w_up, w_down, pre_NF, gains_N1, tokens_N, place_TK)
        ctx.counts, ctx.weight_dtype, ctx.activation, ctx.gated = counts, weights_TK.dtype, activation, gated
        return _sum_choices(out_ND, place_TK)

    @staticmethod
    def backward(ctx, grad_TD):
        x_TD, w_up, w_down, pre_NF, gains_N1, tokens_N, place_TK = ctx.saved_tensors
        wide = torch.promote_types(grad_TD.dtype, torch.float32)  # the router's gradient is summed in fp32 at least
        d_rows_ND = grad_TD.new_empty(len(tokens_N), grad_TD.shape[1])
        d_gains_N = grad_TD.new_zeros(len(tokens_N), dtype=wide)
        d_rows_ND[sum(ctx.counts) :] = 0
        d_up, d_down = torch.zeros_like(w_up), torch.zeros_like(w_down)
        for e, rows in _ranges(ctx.counts):
            grad, x = (t.index_select(0, tokens_N[rows]) for t in (grad_TD, x_TD))
            act, gate, up = _activate(pre_NF[rows], ctx.activation, ctx.gated)
            d_act = grad @ w_down[e].t()  # not yet weighted
            d_gains_N[rows] = (d_act * act).sum(-1, dtype=wide)
            torch.mm(act.mul_(gains_N1[rows]).t(), grad, out=d_down[e])
            d_pre = _activate_backward(d_act.mul_(gains_N1[rows]), gate, up, ctx.activation)
            torch.mm(x.t(), d_pre, out=d_up[e])
            torch.mm(d_pre, w_up[e].t(), out=d_rows_ND[rows])
        d_weights = d_gains_N.index_select(0, place_TK.flatten()).view_as(place_TK).to(ctx.weight_dtype)
        return _sum_choices(d_rows_ND, place_TK), None, d_weights, d_up, d_down, None, None


def _grouped_experts(x_TD, experts_TK, weights_TK, w_up, w_down, activation: str, gated: bool) -> Tensor:
    """Grouped matrix products without a host sync: the path on a GPU."""
    T, K = experts_TK.shape
    order_N, counts_E = sort_slots(experts_TK, len(w_up))
    ends_E = counts_E.cumsum(0).to(torch.int32)
    dropped_N1 = (torch.arange(T * K, device=x_TD.device) >= ends_E[-1])[:, None]
    # Rows behind the last expert come out of a grouped product uninitialised, forward and backward: all ends are masked.
    rows_ND = x_TD.index_select(0, order_N // K).masked_fill(dropped_N1, 0)
    pre_NF = F.grouped_mm(rows_ND, w_up, offs=ends_E).masked_fill(dropped_N1, 0)
    gains_N1 = weights_TK.reshape(-1, 1).index_select(0, order_N)
    act_NF = (_activate(pre_NF, activation, gated)[0] * gains_N1).to(x_TD.dtype).masked_fill(dropped_N1, 0)
    out_ND = F.grouped_mm(act_NF, w_down, offs=ends_E).masked_fill(dropped_N1, 0)
    return out_ND.index_select(0, inverse_permutation(order_N)).view(T, K, -1).sum(1)


def _ranges(counts: list[int]) -> Iterator[tuple[int, slice]]:
    start = 0
    for e, count in enumerate(counts):
        if count:
            yield e, slice(start, start + count)
        start += count


def _activate(pre: Tensor, activation: str, gated: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """A fresh activation, with the gate and up halves it came from (``up`` None if not gated)."""
    gate, up = pre.chunk(2, dim=-1) if gated else (pre, None)
    act = ACTIVATIONS[activation](gate)
    return (act if up is None else act * up), gate, up


def _activate_backward(d_act: Tensor, gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    d_gate_out = d_act if up is None else d_act * up
    if activation == "relu":
        d_gate = torch.ops.aten.threshold_backward(d_gate_out, gate, 0)
    elif activation == "gelu":
        d_gate = torch.ops.aten.gelu_backward(d_gate_out, gate)
    else:
        d_gate = torch.ops.aten.silu_backward(d_gate_out, gate)
    return d_gate if up is None else torch.cat((d_gate, d_act * ACTIVATIONS[activation](gate)), dim=-1)


def _sum_choices(rows_ND: Tensor, place_TK: Tensor) -> Tensor:
    """Gather each token's K rows and add them, in one pass."""
    if place_TK.shape[1] == 1:
        return rows_ND.index_select(0, place_TK.flatten())
    return F.embedding_bag(place_TK, rows_ND, mode="sum")
