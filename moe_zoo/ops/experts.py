"""All experts of a layer as one function of stacked weights: two fast paths; the slow twin is ``ops.reference``.

Slots are sorted by expert; an expert then works on a contiguous range of rows. A slot whose expert is E (one past the
last) was dropped: it sorts behind all others and contributes nothing.

Letters: T tokens, D width, F expert width, E experts, K choices per token, N = T*K slots, P places per expert.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

QUICK = 1.702  # x sigmoid(1.702 x) is close to GELU (arXiv:1606.08415, section 2)


def quick_gelu(x: Tensor) -> Tensor:
    """``x sigmoid(1.702 x)``."""
    return F.silu(QUICK * x) / QUICK


ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "quick_gelu": quick_gelu}


class Stacks(NamedTuple):
    """The weights of all experts: (E, D, F), or (E, D, 2F) with the gate first, and (E, F, D); biases (E, ...)."""

    w_up: Tensor
    w_down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class Unit(NamedTuple):
    """What stands between an expert's two matrices: ``act(gate) * up``, or ``act(up)``.

    With a ``limit`` the gate is cut off above it, the up half above it and below its negative, before the offset.
    """

    activation: str
    gated: bool
    limit: float | None = None
    up_offset: float = 0.0


def expert_ffn(x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor | None, stacks: Stacks, unit: Unit) -> Tensor:
    """``sum_k weights[t, k] * FFN_{experts[t, k]}(x[t])``, shape (T, D). ``weights_TK`` None means ones."""
    if weights_TK is None:
        weights_TK = torch.ones_like(experts_TK, dtype=x_TD.dtype)
    if _suits_grouped_mm(x_TD, stacks.w_up, stacks.w_down):
        return _grouped_experts(x_TD, experts_TK, weights_TK, stacks, unit)
    return LoopedExperts.apply(x_TD, experts_TK, weights_TK, unit, *stacks)


def batched_ffn(x_EPD: Tensor, stacks: Stacks, unit: Unit) -> Tensor:
    """Each expert on its own places. Static shapes and no host sync, at the cost of the places that are empty."""
    act_EPF = activate(*_split(_batched(x_EPD, stacks.w_up, stacks.up_bias), unit), unit)
    return _batched(act_EPF, stacks.w_down, stacks.down_bias)


def _batched(x_EPD: Tensor, weights: Tensor, bias_ED: Tensor | None) -> Tensor:
    return torch.bmm(x_EPD, weights) if bias_ED is None else torch.baddbmm(bias_ED[:, None], x_EPD, weights)


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
    def forward(ctx, x_TD, experts_TK, weights_TK, unit, w_up, w_down, up_bias, down_bias):
        K = experts_TK.shape[1]
        order_N, counts_E = sort_slots(experts_TK, len(w_up))
        tokens_N, counts = order_N // K, host_counts(counts_E)
        gains_N1 = weights_TK.reshape(-1, 1).index_select(0, order_N).to(x_TD.dtype)
        pre_NF = x_TD.new_empty(len(order_N), w_up.shape[2])
        out_ND = x_TD.new_empty(len(order_N), x_TD.shape[1])
        out_ND[sum(counts) :] = 0
        for e, rows in _ranges(counts):
            torch.mm(x_TD.index_select(0, tokens_N[rows]), w_up[e], out=pre_NF[rows])
            if up_bias is not None:
                pre_NF[rows] += up_bias[e]
            act, _ = _activate(*_split(pre_NF[rows], unit), unit)
            torch.mm(act.mul_(gains_N1[rows]), w_down[e], out=out_ND[rows])
            if down_bias is not None:
                out_ND[rows].addr_(gains_N1[rows, 0], down_bias[e])
        place_TK = inverse_permutation(order_N).view_as(experts_TK)
        ctx.save_for_backward(x_TD, w_up, w_down, up_bias, down_bias, pre_NF, gains_N1, tokens_N, place_TK)
        ctx.counts, ctx.weight_dtype, ctx.unit = counts, weights_TK.dtype, unit
        return _sum_choices(out_ND, place_TK)

    @staticmethod
    def backward(ctx, grad_TD):
        x_TD, w_up, w_down, up_bias, down_bias, pre_NF, gains_N1, tokens_N, place_TK = ctx.saved_tensors
        wide = torch.promote_types(grad_TD.dtype, torch.float32)  # the router's gradient is summed in fp32 at least
        d_rows_ND = grad_TD.new_empty(len(tokens_N), grad_TD.shape[1])
        d_gains_N = grad_TD.new_zeros(len(tokens_N), dtype=wide)
        d_rows_ND[sum(ctx.counts) :] = 0
        d_up, d_down = torch.zeros_like(w_up), torch.zeros_like(w_down)
        d_up_bias, d_down_bias = (None if b is None else torch.zeros_like(b) for b in (up_bias, down_bias))
        for e, rows in _ranges(ctx.counts):
            grad, x = (t.index_select(0, tokens_N[rows]) for t in (grad_TD, x_TD))
            act, halves = _activate(*_split(pre_NF[rows], ctx.unit), ctx.unit)
            d_act = grad @ w_down[e].t()  # not yet weighted
            d_gains_N[rows] = (d_act * act).sum(-1, dtype=wide)
            if down_bias is not None:
                d_gains_N[rows] += grad @ down_bias[e]
                torch.mv(grad.t(), gains_N1[rows, 0], out=d_down_bias[e])
            torch.mm(act.mul_(gains_N1[rows]).t(), grad, out=d_down[e])
            d_pre = _activate_backward(d_act.mul_(gains_N1[rows]), halves, ctx.unit)
            if up_bias is not None:
                d_up_bias[e] = d_pre.sum(0)
            torch.mm(x.t(), d_pre, out=d_up[e])
            torch.mm(d_pre, w_up[e].t(), out=d_rows_ND[rows])
        d_weights = d_gains_N.index_select(0, place_TK.flatten()).view_as(place_TK).to(ctx.weight_dtype)
        return _sum_choices(d_rows_ND, place_TK), None, d_weights, None, d_up, d_down, d_up_bias, d_down_bias


def _grouped_experts(x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, stacks: Stacks, unit: Unit) -> Tensor:
    """Grouped matrix products without a host sync: the path on a GPU."""
    T, K = experts_TK.shape
    order_N, counts_E = sort_slots(experts_TK, len(stacks.w_up))
    ends_E = counts_E.cumsum(0).to(torch.int32)
    dropped_N1 = (torch.arange(T * K, device=x_TD.device) >= ends_E[-1])[:, None]
    # Rows behind the last expert come out of a grouped product uninitialised, forward and backward: all ends are masked.
    rows_ND = x_TD.index_select(0, order_N // K).masked_fill(dropped_N1, 0)
    pre_NF = F.grouped_mm(rows_ND, stacks.w_up, offs=ends_E).masked_fill(dropped_N1, 0)
    experts_N = experts_TK.flatten().index_select(0, order_N).clamp_max(len(stacks.w_up) - 1)
    if stacks.up_bias is not None:
        pre_NF = pre_NF + stacks.up_bias.index_select(0, experts_N)
    gains_N1 = weights_TK.reshape(-1, 1).index_select(0, order_N)
    act_NF = (activate(*_split(pre_NF, unit), unit) * gains_N1).to(x_TD.dtype).masked_fill(dropped_N1, 0)
    out_ND = F.grouped_mm(act_NF, stacks.w_down, offs=ends_E)
    if stacks.down_bias is not None:
        out_ND = out_ND + (stacks.down_bias.index_select(0, experts_N) * gains_N1).to(out_ND.dtype)
    out_ND = out_ND.masked_fill(dropped_N1, 0)
    return out_ND.index_select(0, inverse_permutation(order_N)).view(T, K, -1).sum(1)


def _ranges(counts: list[int]) -> Iterator[tuple[int, slice]]:
    start = 0
    for e, count in enumerate(counts):
        if count:
            yield e, slice(start, start + count)
        start += count


def activate(gate: Tensor, up: Tensor | None, unit: Unit) -> Tensor:
    """Hidden units from what the first matrices give; ``up`` is None if not gated."""
    return _activate(gate, up, unit)[0]


class _Halves(NamedTuple):
    """Gate and up half as the activation sees them, and where a limit cut nothing off."""

    gate: Tensor
    up: Tensor | None
    gate_is_free: Tensor | None = None
    up_is_free: Tensor | None = None


def _activate(gate: Tensor, up: Tensor | None, unit: Unit) -> tuple[Tensor, _Halves]:
    """A fresh activation, with what it came from."""
    halves = _Halves(gate, up)
    if unit.limit is not None:
        halves = _Halves(
            gate.clamp(max=unit.limit), up.clamp(-unit.limit, unit.limit), gate <= unit.limit, up.abs() <= unit.limit
        )
    if unit.up_offset:
        halves = halves._replace(up=halves.up + unit.up_offset)
    act = ACTIVATIONS[unit.activation](halves.gate)
    return (act if halves.up is None else act * halves.up), halves


def _split(pre: Tensor, unit: Unit) -> tuple[Tensor, Tensor | None]:
    return pre.chunk(2, dim=-1) if unit.gated else (pre, None)


def _activate_backward(d_act: Tensor, halves: _Halves, unit: Unit) -> Tensor:
    gate, up, gate_is_free, up_is_free = halves
    d_gate = _slope(d_act if up is None else d_act * up, gate, unit.activation)
    if up is None:
        return d_gate
    d_up = d_act * ACTIVATIONS[unit.activation](gate)
    if gate_is_free is not None:
        d_gate, d_up = d_gate * gate_is_free, d_up * up_is_free
    return torch.cat((d_gate, d_up), dim=-1)


def _slope(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return torch.ops.aten.threshold_backward(grad, x, 0)
    if activation == "gelu":
        return torch.ops.aten.gelu_backward(grad, x)
    if activation == "quick_gelu":
        return torch.ops.aten.silu_backward(grad, QUICK * x)
    return torch.ops.aten.silu_backward(grad, x)


def _sum_choices(rows_ND: Tensor, place_TK: Tensor) -> Tensor:
    """Gather each token's K rows and add them, in one pass."""
    if place_TK.shape[1] == 1:
        return rows_ND.index_select(0, place_TK.flatten())
    return F.embedding_bag(place_TK, rows_ND, mode="sum")
