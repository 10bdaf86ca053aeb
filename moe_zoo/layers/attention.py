"""Grouped-query attention with rotary positions. Letters: B batch, S queries, H heads, d head width."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from moe_zoo.layers.norm import AllHeadsNorm
from moe_zoo.ops.attention import attend
from moe_zoo.ops.rope import rotate

Attend = Callable[..., Tensor]  # (queries, keys, values, mask, scale=) as ops.attention.attend


class KeyValueCache(Protocol):
    """What attention asks of a cache; transformers' caches satisfy it."""

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]: ...


class GroupedQueryAttention(nn.Module):
    """``num_heads / num_kv_heads`` query heads share a key and value head. Source: arXiv:2305.13245.

    ``moe_zoo.parallel`` gives it some of the heads, and another ``attend`` where a row is split over ranks.
    """

    attend: Attend

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        qk_norm_eps: float | None,
        qk_norm_over: str = "head",
        bias: bool = False,
        layer: int = 0,
    ):
        super().__init__()
        self.layer, self.head_dim, self.attend = layer, head_dim, attend
        self.query = nn.Linear(d_model, num_heads * head_dim, bias=bias)
        self.key = nn.Linear(d_model, num_kv_heads * head_dim, bias=bias)
        self.value = nn.Linear(d_model, num_kv_heads * head_dim, bias=bias)
        self.out = nn.Linear(num_heads * head_dim, d_model, bias=False)
        self.norms_all_heads = qk_norm_eps is not None and qk_norm_over == "all"
        self.query_norm, self.key_norm = (
            _make_qk_norm(heads, head_dim, qk_norm_eps, qk_norm_over) for heads in (num_heads, num_kv_heads)
        )

    def forward(
        self, hidden: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None, cache: KeyValueCache | None
    ) -> Tensor:
        """``hidden`` (batch, seq, d_model) -> same; ``mask`` broadcasts to (batch, heads, seq, keys), None is causal."""
        q_BHSd = rotate(self._normed(self.query(hidden), self.query_norm), angles)
        k_BHSd = rotate(self._normed(self.key(hidden), self.key_norm), angles)
        v_BHSd = self._heads(self.value(hidden))
        if cache is not None:
            k_BHSd, v_BHSd = cache.update(k_BHSd, v_BHSd, self.layer)
        out_BHSd = self.attend(q_BHSd, k_BHSd, v_BHSd, mask)
        return self.out(out_BHSd.transpose(1, 2).flatten(2))

    def _normed(self, projected: Tensor, norm: nn.Module) -> Tensor:
        return self._heads(norm(projected)) if self.norms_all_heads else norm(self._heads(projected))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _make_qk_norm(num_heads: int, head_dim: int, eps: float | None, over: str) -> nn.Module:
    if eps is None:
        return nn.Identity()
    return nn.RMSNorm(head_dim, eps=eps) if over == "head" else AllHeadsNorm(num_heads * head_dim, eps)
