"""Rotary position embedding. Letters: B batch, S sequence, H heads, d head width, r rotated pairs."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moe_zoo.spec.attention import AttentionSpec, LatentAttentionSpec, RopeScaling


def rotary_angles(
    positions: Tensor, rotary_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """fp32 cosines and sines of shape (B, 1, S, rotary_dim / 2) for integer ``positions`` (B, S).

    Source: RoFormer, arXiv:2104.09864, eq. 15. YaRN's scale of queries and keys is in them.
    """
    powers = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float32) / rotary_dim
    frequencies_r = theta**-powers
    if scaling is not None:
        frequencies_r = scaled_frequencies(frequencies_r, theta, scaling)
    angles = positions[:, None, :, None].float() * frequencies_r
    scale = attention_factor(scaling)
    return angles.cos() * scale, angles.sin() * scale


def scaled_frequencies(frequencies_r: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Radians per position of each pair, stretched."""
    slow_r = frequencies_r / scaling.factor
    if scaling.kind == "linear":
        return slow_r
    if scaling.kind == "llama3":
        turns_r = scaling.original_length * frequencies_r / (2 * math.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        keep_r = ((turns_r - scaling.low_freq_factor) / span).clamp(0, 1)
    else:
        keep_r = 1 - _yarn_ramp(frequencies_r, theta, scaling)
    return keep_r * frequencies_r + (1 - keep_r) * slow_r


def attention_factor(scaling: RopeScaling | None) -> float:
    """By which YaRN multiplies queries and keys each. Source: arXiv:2309.00071, eq. 22."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def _yarn_ramp(frequencies_r: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """0 where a pair turns ``beta_fast`` times and more in the original length, 1 at ``beta_slow`` and fewer."""
    num_pairs = len(frequencies_r)

    def pair_of(turns: float) -> float:
        return num_pairs * math.log(scaling.original_length / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    index_r = torch.arange(num_pairs, device=frequencies_r.device, dtype=torch.float32)
    return ((index_r - low) / max(high - low, 1e-3)).clamp(0, 1)


class Places(NamedTuple):
    """What the positions of queries mean to one kind of attention."""

    angles: tuple[Tensor, Tensor]  # as of ``rotary_angles``
    temperature: Tensor | None = None  # (B, 1, S, 1), multiplies queries
    reach: Tensor | None = None  # (B, S), keys that a query sees, its own the last; None: all before it, or its window


def places_of(positions_BS: Tensor, spec: AttentionSpec | LatentAttentionSpec) -> Places:
    """``positions_BS`` count from the beginning of a document."""
    angles = rotary_angles(positions_BS, spec.rotary_width, spec.rope_theta, spec.rope_scaling)
    if isinstance(spec, LatentAttentionSpec):
        return Places(angles)
    reach = positions_BS % spec.chunk + 1 if spec.chunk else None
    if not spec.temperature:
        return Places(angles, None, reach)
    passed = torch.floor((positions_BS.float() + 1) / spec.temperature_floor)
    return Places(angles, (1 + spec.temperature * torch.log1p(passed))[:, None, :, None], reach)


def rotate(x_BHSd: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs (i, i + r) of the leading 2 r entries, the convention of Llama weights. Same dtype out as in."""
    cos, sin = (part.to(x_BHSd.dtype) for part in angles)
    num_pairs = cos.shape[-1]
    a, b, rest = x_BHSd.split((num_pairs, num_pairs, x_BHSd.shape[-1] - 2 * num_pairs), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def pair_up(x_BHSd: Tensor, width: int) -> Tensor:
    """Of the leading ``width`` entries 0, 2, 4 ..., then 1, 3, 5 ...: neighbours become pairs of ``rotate``.

    Scores do not mind the order.
    """
    return torch.cat((x_BHSd[..., 0:width:2], x_BHSd[..., 1:width:2], x_BHSd[..., width:]), dim=-1)
