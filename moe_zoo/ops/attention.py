"""Attention proper: softmax of scores times values. Letters: B rows, H heads, S queries, d head width."""

import torch.nn.functional as F
from torch import Tensor


def attend(
    q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor, mask: Tensor | None, *, scale: float | None = None
) -> Tensor:
    """(B, H, S, value width). Fewer key heads than query heads are shared; ``mask`` None is causal.

    ``scale`` of the scores: None is 1 / sqrt(d).
    """
    is_causal = mask is None and q_BHSd.shape[2] > 1  # one query at the end of a cache sees every key
    is_grouped = k_BHSd.shape[1] < q_BHSd.shape[1]
    return F.scaled_dot_product_attention(
        q_BHSd, k_BHSd, v_BHSd, attn_mask=mask, is_causal=is_causal, enable_gqa=is_grouped, scale=scale
    )
