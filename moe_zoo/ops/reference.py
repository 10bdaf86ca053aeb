"""The slow, obvious MoE: one token, one choice at a time. Every fast path is tested against it, values and gradients.

Letters: B rows, S positions, T = B*S tokens, D width, E experts, K choices.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def ffn(x: Tensor, stacks: tuple, expert: int, unit: tuple) -> Tensor:
    """One expert on one token, ``x`` (D,). ``stacks``: w_up, w_down, their biases or None."""
    w_up, w_down, up_bias, down_bias = (None if stack is None else stack[expert] for stack in stacks)
    activation, gated, limit, up_offset = unit
    act = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x)}[
        activation
    ]
    pre = x @ w_up if up_bias is None else x @ w_up + up_bias
    if gated:
        gate, up = pre.chunk(2)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        hidden = act(gate) * (up + up_offset)
    else:
        hidden = act(pre)
    return hidden @ w_down if down_bias is None else hidden @ w_down + down_bias


def experts(
    x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, stacks: tuple, unit: tuple, zero_experts: int = 0
) -> Tensor:
    """Weighted sum of the chosen experts, the last of which give back ``x``; an index past the last means dropped."""
    rows = []
    for x, chosen, weights in zip(x_TD, experts_TK.tolist(), weights_TK, strict=True):
        row = torch.zeros_like(x)
        for e, weight in zip(chosen, weights, strict=True):
            if e < len(stacks[0]):
                row = row + weight * ffn(x, stacks, e, unit)
            elif e < len(stacks[0]) + zero_experts:
                row = row + weight * x
        rows.append(row)
    return torch.stack(rows)


def attention(q_BHSd: Tensor, k_BHKd: Tensor, v_BHKd: Tensor, scale: float, window: int | None, sinks_H) -> Tensor:
    """Causal attention of one query after the other, with heads of their own; queries are the last S of the keys."""
    B, H, S, _ = q_BHSd.shape
    K = k_BHKd.shape[2]
    out = []
    for b, h, s in ((b, h, s) for b in range(B) for h in range(H) for s in range(S)):
        end = K - S + s + 1
        keys = slice(0 if window is None else max(0, end - window), end)
        scores = [scale * q_BHSd[b, h, s] @ k for k in k_BHKd[b, h, keys]]
        share = torch.stack(scores if sinks_H is None else [*scores, sinks_H[h]]).softmax(0)
        out.append(share[: len(scores)] @ v_BHKd[b, h, keys])
    return torch.stack(out).view(B, H, S, -1)


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


def mix(logits: Tensor, top_k: int, tolerance: float) -> tuple[list[int], list[Tensor]]:
    """Experts and weights of one token by SparseMixer."""
    values, chosen, weights = logits.tolist(), [], []
    for _ in range(top_k):
        left = [e for e in range(len(values)) if e not in chosen]
        best = max(left, key=lambda e: values[e])
        near = [e for e in left if (values[best] - values[e]) / max(abs(values[e]), values[best]) <= 2 * tolerance]
        chosen.append(best)
        weights.append(logits[near].softmax(0)[near.index(best)])
    return chosen, weights


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


def drop(
    chosen_BSK: list[list[list[int]]], num_experts: int, factor: float, zero_experts: int = 0
) -> list[list[list[int]]]:
    """The same choices with one past the last where an expert's capacity in that row was used up.

    The last ``zero_experts`` of ``num_experts`` have no capacity.
    """
    out = []
    for row in chosen_BSK:
        top_k = len(row[0])
        room = [math.ceil(factor * len(row) * top_k / num_experts)] * (num_experts - zero_experts)
        room += [len(row)] * zero_experts
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
