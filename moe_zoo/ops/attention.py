"""Attention proper: softmax of scores times values. Letters: B rows, H heads, S queries, K keys, d head width."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

SINK_ENTRIES = 8  # a head grows by one, and by zeros up to what keeps rows of 16 bytes, as kernels on a GPU ask


def attend(
    q_BHSd: Tensor,
    k_BHKd: Tensor,
    v_BHKd: Tensor,
    mask: Tensor | None,
    *,
    scale: float | None = None,
    window: int | None = None,
    reach_BS: Tensor | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """(B, H, S, value width). Fewer key heads than query heads are shared; queries are the last S of the K keys.

    ``mask`` None is causal; ``window`` leaves a query that many keys, its own the last, ``reach_BS`` each its own number.
    A sink is a score beside those of the keys, without a value (arXiv:2309.17453). ``scale`` None is 1 / sqrt(d).
    """
    scale = q_BHSd.shape[-1] ** -0.5 if scale is None else scale
    if window is not None:
        k_BHKd, v_BHKd, mask = _within(window, q_BHSd.shape[2], k_BHKd, v_BHKd, mask)
    if reach_BS is not None:
        seen = _reached(reach_BS, k_BHKd.shape[2])
        mask = seen if mask is None else seen & mask
    if sinks_H is not None:
        q_BHSd, k_BHKd, v_BHKd, mask = _with_sinks(sinks_H / scale, q_BHSd, k_BHKd, v_BHKd, mask)
    S, K = q_BHSd.shape[2], k_BHKd.shape[2]
    if mask is None and 1 < S < K:  # one query at the end sees every key
        mask = causal_lower_right(S, K)
    return F.scaled_dot_product_attention(
        q_BHSd,
        k_BHKd,
        v_BHKd,
        attn_mask=mask,
        is_causal=mask is None and S > 1,
        enable_gqa=k_BHKd.shape[1] < q_BHSd.shape[1],
        scale=scale,
    )


def _within(
    window: int, S: int, k_BHKd: Tensor, v_BHKd: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys that some query sees, and a mask that tells which; None where causal says as much."""
    num_seen = min(k_BHKd.shape[2], S + window - 1)
    k_BHKd, v_BHKd = k_BHKd[:, :, -num_seen:], v_BHKd[:, :, -num_seen:]
    mask = mask if mask is None else mask[..., -num_seen:]
    if num_seen <= window:
        return k_BHKd, v_BHKd, mask
    seen_SK = torch.ones(S, num_seen, dtype=torch.bool, device=k_BHKd.device)
    seen_SK = seen_SK.tril(num_seen - S).triu(num_seen - S - window + 1)
    return k_BHKd, v_BHKd, seen_SK if mask is None else seen_SK & mask


def _reached(reach_BS: Tensor, K: int) -> Tensor:
    """(B, 1, S, K), True for the keys that a query reaches."""
    S = reach_BS.shape[1]
    keys_K = torch.arange(K, device=reach_BS.device)
    back_SK = keys_K[K - S :, None] - keys_K
    return ((back_SK >= 0) & (back_SK < reach_BS[..., None]))[:, None]


def _with_sinks(
    sinks_H: Tensor, q_BHSd: Tensor, k_BHKd: Tensor, v_BHKd: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """One more key, before all others, with which a query's product is its head's sink; its value is zero."""
    entry_BHS1 = sinks_H.to(q_BHSd.dtype)[None, :, None, None].expand(*q_BHSd.shape[:3], 1)
    q_BHSd = torch.cat((q_BHSd, F.pad(entry_BHS1, (0, SINK_ENTRIES - 1))), dim=-1)
    d, first = k_BHKd.shape[-1], k_BHKd.new_zeros(*k_BHKd.shape[:2], 1, q_BHSd.shape[-1])
    first[..., d] = 1.0
    k_BHKd = torch.cat((first, F.pad(k_BHKd, (0, SINK_ENTRIES))), dim=2)
    v_BHKd = F.pad(v_BHKd, (0, 0, 1, 0))
    return q_BHSd, k_BHKd, v_BHKd, mask if mask is None else F.pad(mask, (1, 0), value=True)
