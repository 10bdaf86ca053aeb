"""Rotary position embedding. Letters: B batch, S sequence, H heads."""

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """fp32 cosines and sines of shape (B, 1, S, head_dim / 2) for integer ``positions`` (B, S).

    Source: RoFormer, arXiv:2104.09864, eq. 15.
    """
    powers = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[:, None, :, None].float() * theta**-powers
    return angles.cos(), angles.sin()


def rotate(x_BHSd: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2), the convention of Llama weights. Same dtype out as in."""
    cos, sin = (part.to(x_BHSd.dtype) for part in angles)
    a, b = x_BHSd.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
