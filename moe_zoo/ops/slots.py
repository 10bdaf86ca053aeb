"""Slots: where they go when experts are cut in slices or have a fixed number of places, and rows to slots and back.

Letters: T tokens, D width, K choices per token, N = T*K slots, S of them sent, s slices of an expert.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_zoo.ops.experts import inverse_permutation, sort_slots


def visit_slices(
    experts_TK: Tensor, weights_TK: Tensor, num_experts: int, num_own: int, slices: int
) -> tuple[Tensor, Tensor]:
    """The same choice where each expert's hidden units are cut in ``slices``: (T, K * slices) experts and weights.

    A slice of an expert is an expert of its own: partial outputs add up under the same weight. A rank holds one slice
    of ``num_own`` experts; ranks are ordered by expert, then slice.
    """
    if slices == 1:
        return experts_TK, weights_TK
    first_TK1 = (experts_TK // num_own * slices * num_own + experts_TK % num_own)[..., None]
    slices_TKs = first_TK1 + num_own * torch.arange(slices, device=experts_TK.device)
    slices_TKs = slices_TKs.where(experts_TK[..., None] < num_experts, num_experts * slices)
    return slices_TKs.flatten(1), weights_TK.repeat_interleave(slices, dim=1)


def place_slots(experts_TK: Tensor, num_experts: int, num_places: int) -> Tensor:
    """(N,) where each slot lies when expert e has the places ``e * num_places`` on, in the order of slots.

    What was dropped lies at ``num_experts * num_places``, one past the last. An expert must not have more slots than
    places.
    """
    order_N, counts_E = sort_slots(experts_TK, num_experts)
    starts = torch.cat((counts_E.new_zeros(1), counts_E.cumsum(0)))  # the last: where the dropped ones start
    flat_N = experts_TK.flatten()
    rank_N = inverse_permutation(order_N) - starts[flat_N]
    return torch.where(flat_N < num_experts, flat_N * num_places + rank_N, num_experts * num_places)


class RowsToSlots(torch.autograd.Function):
    """``x[order[i] // K]`` for the first S slots of ``order``; backward gathers and adds a token's rows in one pass."""

    @staticmethod
    def forward(ctx, x_TD, order_N, top_k, num_sent):
        ctx.place_TK = inverse_permutation(order_N).view(-1, top_k)
        return x_TD.index_select(0, order_N[:num_sent] // top_k)

    @staticmethod
    def backward(ctx, grad_SD):
        return _add_places(grad_SD, ctx.place_TK, None), None, None, None


class SlotsToRows(torch.autograd.Function):
    """The weighted sum of each token's rows, which lie in the order of slots; a slot behind the last row adds nothing.

    One pass each way, where a gather, a product and a sum under autograd take seven.
    """

    @staticmethod
    def forward(ctx, y_SD, weights_TK, order_N):
        place_TK = inverse_permutation(order_N).view_as(weights_TK)
        ctx.save_for_backward(y_SD, weights_TK, order_N)
        return _add_places(y_SD, place_TK, weights_TK.to(y_SD.dtype))

    @staticmethod
    def backward(ctx, grad_TD):
        y_SD, weights_TK, order_N = ctx.saved_tensors
        sent_S = order_N[: len(y_SD)]
        rows_SD = grad_TD.index_select(0, sent_S // weights_TK.shape[1])
        d_weights_N = weights_TK.new_zeros(len(order_N))
        d_weights_N[sent_S] = (rows_SD * y_SD).sum(-1, dtype=weights_TK.dtype)
        gains_S1 = weights_TK.flatten()[sent_S][:, None].to(rows_SD.dtype)
        return rows_SD.mul_(gains_S1), d_weights_N.view_as(weights_TK), None


def _add_places(rows_SD: Tensor, place_TK: Tensor, gains_TK: Tensor | None) -> Tensor:
    """``sum_k gains[t, k] * rows[place[t, k]]``, over the places that there are."""
    if not len(rows_SD):
        return rows_SD.new_zeros(len(place_TK), rows_SD.shape[1])
    if len(rows_SD) < place_TK.numel():
        gains_TK = torch.ones_like(place_TK, dtype=rows_SD.dtype) if gains_TK is None else gains_TK
        gains_TK = gains_TK.masked_fill(place_TK >= len(rows_SD), 0)
        place_TK = place_TK.clamp_max(len(rows_SD) - 1)
    return F.embedding_bag(place_TK, rows_SD, per_sample_weights=gains_TK, mode="sum")
