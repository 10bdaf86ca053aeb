"""Grouped-query attention with rotary positions. Letters: B batch, S queries, H heads, d head width."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from moe_zoo.ops.attention import attend
from moe_zoo.ops.rope import rotate

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # (queries, keys, values, mask)


class KeyValueCache(Protocol):
    """What attention asks of a cache; transformers' caches satisfy it."""

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]: ...


class GroupedQueryAttention(nn.Module):
    """``num_heads / num_kv_heads`` query heads share a key and value head. Source: arXiv:2305.13245.

    ``moe_zoo.parallel`` gives it some of the heads, and another ``attend`` where a row is split over ranks.
    """

    attend: Attend

    def __init__(
        self, d_model: int, num_heads: int, num_kv_heads: int, head_dim: int, qk_norm_eps: float | None, layer: int
    ):
        super().__init__()
        self.layer, self.head_dim, self.attend = layer, head_dim, attend
        self.query = nn.Linear(d_model, num_heads * head_dim, bias=False)
        self.key = nn.Linear(d_model, num_kv_heads * head_dim, bias=False)
        self.value = nn.Linear(d_model, num_kv_heads * head_dim, bias=False)
        self.out = nn.Linear(num_heads * head_dim, d_model, bias=False)
        has_norm = qk_norm_eps is not None
        self.query_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps) if has_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps) if has_norm else nn.Identity()

    def forward(
        self, hidden: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None, cache: KeyValueCache | None
    ) -> Tensor:
        """``hidden`` (batch, seq, d_model) -> same; ``mask`` broadcasts to (batch, heads, seq, keys), None is causal."""
        q_BHSd, k_BHSd, v_BHSd = (
            project(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        q_BHSd = rotate(self.query_norm(q_BHSd), angles)
        k_BHSd = rotate(self.key_norm(k_BHSd), angles)
        if cache is not None:
            k_BHSd, v_BHSd = cache.update(k_BHSd, v_BHSd, self.layer)
        out_BHSd = self.attend(q_BHSd, k_BHSd, v_BHSd, mask)
        return self.out(out_BHSd.transpose(1, 2).flatten(2))
