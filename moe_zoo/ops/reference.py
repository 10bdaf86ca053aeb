"""The slow, obvious MoE: one token, one choice at a time. Every fast path is tested against it, values and gradients.

Letters: B rows, S positions, T = B*S tokens, D width, E experts, K choices.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def ffn(x: Tensor, w_up: Tensor, w_down: Tensor, activation: str, gated: bool) -> Tensor:
    """One expert on one token, ``x`` (D,)."""
    act = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}[activation]
    if not gated:
        return act(x @ w_up) @ w_down
    gate, up = (x @ w_up).chunk(2)
    return (act(gate) * up) @ w_down


def experts(x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, w_up, w_down, activation: str, gated: bool) -> Tensor:
    """Weighted sum of the chosen experts; an expert index past the last means dropped."""
    rows = []
    for x, chosen, weights in zip(x_TD, experts_TK.tolist(), weights_TK, strict=True):
        row = torch.zeros_like(x)
        for e, weight in zip(chosen, weights, strict=True):
            if e < len(w_up):
                row = row + weight * ffn(x, w_up[e], w_down[e], activation, gated)
        rows.append(row)
    return torch.stack(rows)


def choose(
    logits: Tensor,
    *,
    top_k: int,
    score: str,
    normalize: bool,
    scale: float,
    bias: Tensor | None,
    groups: tuple[int, int, str] = (1, 1, "max"),
) -> tuple[list[int], list[Tensor]]:
    """Experts and weights of one token from its router logits (E,). ``groups``: how many, how many allowed, score."""
    scores = [s for s in logits.softmax(0)] if score == "softmax" else [s.sigmoid() for s in logits]
    wanted = [float(s.detach()) + (float(bias[e]) if bias is not None else 0.0) for e, s in enumerate(scores)]
    chosen = sorted(allowed_experts(wanted, *groups), key=lambda e: -wanted[e])[:top_k]
    weights = [scores[e] for e in chosen]
    total = sum(weights) if normalize else 1.0
    return chosen, [scale * weight / total for weight in weights]


def allowed_experts(wanted: list[float], num_groups: int, groups_per_token: int, group_score: str) -> list[int]:
    """The experts of one token's best groups."""
    size = len(wanted) // num_groups
    members = [range(g * size, (g + 1) * size) for g in range(num_groups)]

    def worth(group: range) -> float:
        return sum(sorted((wanted[e] for e in group), reverse=True)[: {"max": 1, "top2": 2}[group_score]])

    best = sorted(members, key=worth, reverse=True)[:groups_per_token]
    return [e for group in best for e in group]


def take(scores_BSE: Tensor, top_k: int, factor: float) -> Tensor:
    """Mask (B, S, E): each expert takes its best tokens of each row, one after the other."""
    B, S, E = scores_BSE.shape
    taken_BSE = torch.zeros(B, S, E, dtype=torch.bool)
    for b in range(B):
        for e in range(E):
            column = scores_BSE[b, :, e].tolist()
            for s in sorted(range(S), key=lambda s: -column[s])[: math.ceil(factor * S * top_k / E)]:
                taken_BSE[b, s, e] = True
    return taken_BSE


def drop(chosen_BSK: list[list[list[int]]], num_experts: int, factor: float) -> list[list[list[int]]]:
    """The same choices with ``num_experts`` where an expert's capacity in that row was used up."""
    out = []
    for row in chosen_BSK:
        top_k = len(row[0])
        room = [math.ceil(factor * len(row) * top_k / num_experts)] * num_experts
        kept = [[num_experts] * top_k for _ in row]
        for k in range(top_k):  # all first choices before any second one
            for s, choices in enumerate(row):
                if room[choices[k]]:
                    room[choices[k]] -= 1
                    kept[s][k] = choices[k]
        out.append(kept)
    return out


def balance_loss(probs_LTE: Tensor, chosen_LTK: Tensor, pools: int) -> Tensor:
    """Mean over layers and over ``pools`` equal runs of tokens of ``E * sum_e f_e P_e`` (Switch, eqs. 4-6)."""
    num_experts, terms = probs_LTE.shape[-1], []
    for probs_TE, chosen_TK in zip(probs_LTE, chosen_LTK, strict=True):
        for probs, chosen in zip(probs_TE.chunk(pools), chosen_TK.chunk(pools), strict=True):
            fraction = torch.stack([(chosen == e).sum() / chosen.numel() for e in range(num_experts)])
            terms.append(num_experts * (fraction.to(probs.dtype) * probs.mean(0)).sum())
    return torch.stack(terms).mean()
