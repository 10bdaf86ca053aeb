"""Who is chosen by a router, by the slow reference, and how near the choice was to another.

Letters: B rows, S positions, T = B*S tokens, E experts, K choices, N slots.
"""

import math

import torch
from torch import Tensor

from moe_zoo.layers.router import TopKRouter
from moe_zoo.ops import reference


def choose(router: TopKRouter, scores_TE: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """(experts before capacity, (T, K), or (N, 1) where experts choose; the smallest gap to what was not chosen)."""
    if router.choice == "expert":
        return _experts_choose(router, scores_TE.unflatten(0, (num_rows, -1)))
    wanted_TE = scores_TE if router.selection_bias is None else scores_TE + router.selection_bias
    if router.limit is None:
        return wanted_TE.topk(router.top_k).indices, gap_after(wanted_TE, router.top_k)
    allowed = torch.tensor([reference.allowed_experts(wanted, *router.limit) for wanted in wanted_TE.tolist()])
    outside_TE = torch.ones_like(wanted_TE, dtype=torch.bool).scatter_(1, allowed, False)
    within_TE = wanted_TE.masked_fill(outside_TE, -torch.inf)
    gap = torch.minimum(gap_after(within_TE, router.top_k), _gap_between_groups(router, wanted_TE))
    return within_TE.topk(router.top_k).indices, gap


def gap_after(values: Tensor, count: int) -> Tensor:
    """Smallest distance, over rows, between the last of the ``count`` largest values and the next, over their mean size.

    Probabilities over many experts are small, and so is what rounding does to them.
    """
    if count >= values.shape[-1]:
        return torch.tensor(torch.inf, dtype=values.dtype)
    last, following = values.sort(-1, descending=True).values[..., count - 1 : count + 1].unbind(-1)
    return ((last - following) / values.where(values.isfinite(), 0).abs().mean(-1)).min()


def _experts_choose(router: TopKRouter, scores_BSE: Tensor) -> tuple[Tensor, Tensor]:
    factor = router.capacity_factor or 1.0
    taken_BSE = reference.take(scores_BSE, router.top_k, factor)
    count = math.ceil(factor * scores_BSE.shape[1] * router.top_k / router.num_experts)
    return taken_BSE.nonzero()[:, 2:], gap_after(scores_BSE.transpose(1, 2), count)


def _gap_between_groups(router: TopKRouter, wanted_TE: Tensor) -> Tensor:
    limit = router.limit
    best = {"max": 1, "top2": 2}[limit.score]
    members_TGE = wanted_TE.unflatten(1, (limit.num_groups, -1))
    worth_TG = members_TGE.topk(min(best, members_TGE.shape[-1])).values.sum(-1)
    return gap_after(worth_TG, limit.groups_per_token)
