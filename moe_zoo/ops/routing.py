"""Routing math: which experts a token chooses, with what weight, and who is refused.

Letters: B rows (sequences), S positions, T = B*S tokens, E experts, K choices per token, N = T*K slots.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Choice(NamedTuple):
    """What a router decided, before capacity."""

    weights_TK: Tensor
    experts_TK: Tensor
    probs_TE: Tensor  # each row sums to one: the P of the balance loss


def choose_experts(
    logits_TE: Tensor, *, top_k: int, score: str, normalize: bool, scale: float, bias_E: Tensor | None = None
) -> Choice:
    """Top-k choice by softmax or sigmoid score; ``bias_E`` moves the choice, never the weight.

    Source: Switch, arXiv:2101.03961, eqs. 1-2 (softmax); DeepSeek-V3, arXiv:2412.19437, eqs. 12-16 (sigmoid).
    """
    if score == "softmax":
        scores_TE = probs_TE = logits_TE.softmax(dim=-1)
    else:
        scores_TE = logits_TE.sigmoid()
        probs_TE = scores_TE / scores_TE.sum(-1, keepdim=True).clamp_min(1e-20)  # DeepSeek-V3, eq. 19
    wanted_TE = scores_TE if bias_E is None else scores_TE + bias_E
    experts_TK = wanted_TE.detach().topk(top_k, dim=-1).indices
    weights_TK = scores_TE.gather(-1, experts_TK)
    if normalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True).clamp_min(1e-20)
    return Choice(weights_TK * scale, experts_TK, probs_TE)


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
