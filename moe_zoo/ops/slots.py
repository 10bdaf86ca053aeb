"""Where slots go when experts are cut in slices or have a fixed number of places. No host sync, static shapes.

Letters: T tokens, K choices per token, N = T*K slots, s slices of an expert.
"""

import torch
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
