"""Relative positions: distances sorted into buckets, and attention whose scores get a bias for each.

Letters: B rows, H heads, S queries, K keys, d head width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def relative_buckets(distances: Tensor, num_buckets: int, max_distance: int, *, sees_both_ways: bool) -> Tensor:
    """The bucket of each ``place of key - place of query``, the same shape.

    Half of the buckets hold one distance each, the others grow with its logarithm up to ``max_distance``, behind which
    all are alike. Who sees both ways gives half of the buckets to each direction; who does not sees distance 0 in every
    later key, which a causal mask hides. Source: T5, arXiv:1910.10683, section 2.1.
    """
    offset = torch.zeros_like(distances)
    if sees_both_ways:
        num_buckets //= 2
        offset = (distances > 0) * num_buckets
        distances = distances.abs()
    else:
        distances = (-distances).clamp_min(0)
    num_exact = num_buckets // 2
    # fp32 and this order of operations: a rounded logarithm decides where a bucket ends in published weights.
    steps = torch.log(distances.clamp_min(1).float() / num_exact) / math.log(max_distance / num_exact)
    wide = (num_exact + (steps * (num_buckets - num_exact)).long()).clamp_max(num_buckets - 1)
    return offset + torch.where(distances < num_exact, distances, wide)


def attend_biased(q_BHSd: Tensor, k_BHKd: Tensor, v_BHKd: Tensor, bias: Tensor | None) -> Tensor:
    """(B, H, S, d). ``bias`` broadcasts to (B, H, S, K) and is added to scores that are not scaled; None hides nothing.

    Source: T5, arXiv:1910.10683: 1 / sqrt(d) is folded into the initial queries.
    """
    return F.scaled_dot_product_attention(q_BHSd, k_BHKd, v_BHKd, attn_mask=bias, scale=1.0)
