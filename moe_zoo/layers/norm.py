"""The norms of the zoo."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def make_norm(kind: str, width: int, eps: float) -> nn.Module:
    """``rmsnorm`` (one gain) or ``layernorm`` (gain and bias) over the last dimension."""
    return nn.RMSNorm(width, eps=eps) if kind == "rmsnorm" else nn.LayerNorm(width, eps=eps)


class AllHeadsNorm(nn.Module):
    """RMSNorm over all heads together, before they are told apart (OLMoE, arXiv:2409.02060, section 4.2.5).

    ``moe_zoo.parallel`` gives it some of the heads, and an ``average`` over those that have the others.
    """

    average: Callable[[Tensor], Tensor]

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps
        self.average = lambda mean_square: mean_square

    def forward(self, x: Tensor) -> Tensor:
        """(..., heads * head width) -> same; in fp32 at least."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = self.average(wide.square().mean(-1, keepdim=True))
        return (wide * torch.rsqrt(mean_square + self.eps)).to(x.dtype) * self.weight
