"""The two norms of the zoo."""

from torch import nn


def make_norm(kind: str, width: int, eps: float) -> nn.Module:
    """``rmsnorm`` (one gain) or ``layernorm`` (gain and bias) over the last dimension."""
    return nn.RMSNorm(width, eps=eps) if kind == "rmsnorm" else nn.LayerNorm(width, eps=eps)
