"""Routing math: who chooses whom, with what weight, and who is refused.

Letters: B rows (sequences), S positions, T = B*S tokens, E experts, G groups of experts, K choices per token,
C tokens per expert and row, N slots (T*K where tokens choose, B*C*E where experts do).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Scores(NamedTuple):
    """What a router thinks of each token and expert."""

    scores_TE: Tensor  # the weight of an expert, should it be chosen
    probs_TE: Tensor  # each row sums to one: the P of the balance loss


class GroupLimit(NamedTuple):
    """Experts lie in ``num_groups`` equal runs; a token chooses within its ``groups_per_token`` best."""

    num_groups: int
    groups_per_token: int
    score: str  # of a group: "max", its best expert's; "top2", the sum of its two best


class TakenSlots(NamedTuple):
    """The slots of experts that chose. An expert index equal to the number of experts means an empty place."""

    tokens_N: Tensor
    experts_N: Tensor
    weights_N: Tensor


def score_experts(logits_TE: Tensor, score: str) -> Scores:
    """Softmax or sigmoid of the router's logits.

    Source: Switch, arXiv:2101.03961, eq. 1 (softmax); DeepSeek-V3, arXiv:2412.19437, eqs. 15 and 19 (sigmoid).
    """
    if score != "sigmoid":
        probs_TE = logits_TE.softmax(dim=-1)
        return Scores(probs_TE, probs_TE)
    scores_TE = logits_TE.sigmoid()
    return Scores(scores_TE, scores_TE / scores_TE.sum(-1, keepdim=True).clamp_min(1e-20))


def choose_experts(
    scores_TE: Tensor,
    *,
    top_k: int,
    normalize: bool,
    scale: float,
    bias_E: Tensor | None = None,
    limit: GroupLimit | None = None,
) -> tuple[Tensor, Tensor]:
    """Each token's K best experts: weights and indices, both (T, K). ``bias_E`` moves the choice, never the weight.

    Source: Switch, arXiv:2101.03961, eq. 2; DeepSeek-V3, arXiv:2412.19437, eqs. 13, 14 and 16.
    """
    wanted_TE = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E
    if limit is not None:
        wanted_TE = within_groups(wanted_TE, limit)
    experts_TK = wanted_TE.topk(top_k, dim=-1).indices
    weights_TK = scores_TE.gather(-1, experts_TK)
    if normalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True).clamp_min(1e-20)
    return weights_TK * scale, experts_TK


def sparse_mixer(logits_TE: Tensor, *, top_k: int, tolerance: float) -> tuple[Tensor, Tensor]:
    """The K best experts, (T, K) twice: each weighted by a softmax over those left that are not far behind it.

    Source: GRIN, arXiv:2409.12136, section 2.1: its law of evaluation, here in training too, without its sampling.
    """
    left_TE, weights, chosen = logits_TE, [], []
    for _ in range(top_k):
        best_T1, expert_T1 = left_TE.detach().max(-1, keepdim=True)
        behind_TE = (best_T1 - logits_TE.detach()) / logits_TE.detach().abs().clamp_min(best_T1)
        shares_TE = left_TE.masked_fill(behind_TE > 2 * tolerance, -torch.inf).softmax(-1)
        weights.append(shares_TE.gather(-1, expert_T1))
        chosen.append(expert_T1)
        left_TE = left_TE.scatter(-1, expert_T1, -torch.inf)
    return torch.cat(weights, dim=-1), torch.cat(chosen, dim=-1)


def within_groups(wanted_TE: Tensor, limit: GroupLimit) -> Tensor:
    """``wanted_TE`` with minus infinity outside each token's best groups: a biased score may lie below zero.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.2 (max); DeepSeek-V3, arXiv:2412.19437, section 2.1.2 (the sum
    of the K / groups_per_token best, which are two in its configuration).
    """
    wanted_TGe = wanted_TE.unflatten(-1, (limit.num_groups, -1))
    num_best = min(2 if limit.score == "top2" else 1, wanted_TGe.shape[-1])
    groups_TG = wanted_TGe.topk(num_best, dim=-1).values.sum(-1)
    chosen = groups_TG.topk(limit.groups_per_token, dim=-1).indices
    allowed_TG = torch.zeros_like(groups_TG, dtype=torch.bool).scatter_(-1, chosen, True)
    return wanted_TGe.masked_fill(~allowed_TG[..., None], -torch.inf).flatten(-2)


def take_tokens(scores_BSE: Tensor, capacity: int) -> Tensor:
    """Mask (B, S, E) of the ``capacity`` best tokens of each expert and row; of two that are equal, the earlier.

    Source: expert choice, Zhou et al., arXiv:2202.09368, section 3.2, with the row as the group.
    """
    order_BSE = scores_BSE.argsort(dim=1, descending=True, stable=True)
    return torch.zeros_like(scores_BSE, dtype=torch.bool).scatter_(1, order_BSE[:, :capacity], True)


def taken_slots(scores_BSE: Tensor, taken_BSE: Tensor, capacity: int, *, normalize: bool, scale: float) -> TakenSlots:
    """``capacity`` slots for each row and expert, those of ``taken_BSE`` first: their number depends on no data."""
    B, S, E = scores_BSE.shape
    places_BCE = (~taken_BSE).to(torch.uint8).argsort(dim=1, stable=True)[:, :capacity]
    experts_E = torch.arange(E, device=scores_BSE.device)
    if normalize:
        scores_BSE = scores_BSE / (scores_BSE * taken_BSE).sum(-1, keepdim=True).clamp_min(1e-20)
    return TakenSlots(
        tokens_N=(places_BCE + S * torch.arange(B, device=scores_BSE.device)[:, None, None]).flatten(),
        experts_N=experts_E.where(taken_BSE.gather(1, places_BCE), E).flatten(),
        weights_N=scores_BSE.gather(1, places_BCE).flatten() * scale,
    )


def count_per_row(experts_TK: Tensor, num_rows: int, num_experts: int) -> Tensor:
    """Slots that chose each expert, (num_rows, num_experts), int64. No host sync, and no size that depends on data."""
    ids_BN = experts_TK.reshape(num_rows, -1)
    counts_BE = torch.zeros(num_rows, num_experts, dtype=torch.int64, device=experts_TK.device)
    return counts_BE.scatter_add_(1, ids_BN, torch.ones_like(ids_BN))


def expert_capacity(factor: float, num_tokens: int, top_k: int, num_experts: int) -> int:
    """Slots an expert accepts from a group of ``num_tokens``. Source: Switch, arXiv:2101.03961, eq. 3."""
    return math.ceil(factor * num_tokens * top_k / num_experts)


def within_capacity(experts_BSK: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Mask (B, S, K) of the slots accepted when each expert takes ``capacity`` slots of each row.

    First choices go before second ones, earlier tokens before later ones (GShard, arXiv:2006.16668, algorithm 1).
    The group is the row, so who is dropped does not depend on the layout.
    """
    B, S, K = experts_BSK.shape
    rows_B11 = torch.arange(B, device=experts_BSK.device)[:, None, None]
    keys_N = (rows_B11 * num_experts + experts_BSK).transpose(1, 2).flatten()
    order_N = keys_N.argsort(stable=True)
    counts = torch.zeros(B * num_experts, dtype=torch.int64, device=keys_N.device)
    counts.scatter_add_(0, keys_N, torch.ones_like(keys_N))
    starts = counts.cumsum(0) - counts
    place_N = torch.empty_like(keys_N)
    place_N[order_N] = torch.arange(len(keys_N), device=keys_N.device) - starts[keys_N[order_N]]
    return (place_N < capacity).view(B, K, S).transpose(1, 2)
