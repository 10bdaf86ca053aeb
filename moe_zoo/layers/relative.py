"""Attention with relative positions, and the block of an encoder-decoder around it.

Letters: B batch, S queries, K keys, H heads, d head width.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_zoo.layers.moe import MoELayer
from moe_zoo.layers.router import RouterStats
from moe_zoo.ops.relative import attend_biased, relative_buckets

AttendBiased = Callable[..., Tensor]  # (queries, keys, values, bias) as ops.relative.attend_biased


class TwoCaches(Protocol):
    """Keys and values of a decoder and those of what its encoder said; transformers' EncoderDecoderCache satisfies it."""

    self_attention_cache: Any
    cross_attention_cache: Any
    is_updated: dict[int, bool]


class PairView(Protocol):
    """Which queries, keys and heads of a row meet on this rank."""

    def pairs(self, num_local: int, num_heads: int, device: torch.device) -> tuple[Tensor, Tensor, slice]:
        """(places of queries, places of keys, heads) where ``num_local`` tokens are here between layers."""
        ...


class WholePairs:
    """All of them."""

    def pairs(self, num_local: int, num_heads: int, device: torch.device) -> tuple[Tensor, Tensor, slice]:
        places = torch.arange(num_local, device=device)
        return places, places, slice(num_heads)


class PositionTables(nn.Module):
    """A number per bucket of distances and head, for the encoder and for the decoder. All blocks of a half share them."""

    def __init__(self, num_buckets: int, num_heads: int):
        super().__init__()
        self.encoder = nn.Parameter(torch.empty(num_buckets, num_heads))
        self.decoder = nn.Parameter(torch.empty(num_buckets, num_heads))

    def forward(self) -> Tensor:
        """(2, buckets, heads)."""
        return torch.stack((self.encoder, self.decoder))


class RelativeBias(nn.Module):
    """A table -> what is added to the scores of one half. It owns no weight: only the first stage of a pipeline does.

    ``moe_zoo.parallel`` swaps ``view`` where a row is split over ranks.
    """

    view: PairView

    def __init__(self, max_distance: int, *, is_causal: bool):
        super().__init__()
        self.max_distance, self.is_causal, self.view = max_distance, is_causal, WholePairs()

    def forward(self, table: Tensor, num_local: int, num_past: int = 0) -> Tensor:
        """``table`` (buckets, heads) -> (1, heads, queries, keys), minus infinity where a query may not look.

        With ``num_past`` the queries are the last ``num_local`` of ``num_past + num_local`` tokens of a cache.
        """
        queries, keys, heads = self.view.pairs(num_past + num_local, table.shape[1], table.device)
        distances = keys - queries[num_past:, None]
        buckets = relative_buckets(distances, len(table), self.max_distance, sees_both_ways=not self.is_causal)
        bias = F.embedding(buckets, table[:, heads]).permute(2, 0, 1)[None]
        return bias.masked_fill(distances > 0, -torch.inf) if self.is_causal else bias


class RelativeAttention(nn.Module):
    """Multi-head attention without scaling: of a row on itself, or of a decoder on what its encoder said.

    ``moe_zoo.parallel`` gives it some of the heads, and another ``attend`` where a row is split over ranks.
    """

    attend: AttendBiased

    def __init__(self, d_model: int, num_heads: int, head_dim: int, *, layer: int = 0):
        super().__init__()
        self.layer, self.head_dim, self.attend = layer, head_dim, attend_biased
        self.query, self.key, self.value = (nn.Linear(d_model, num_heads * head_dim, bias=False) for _ in range(3))
        self.out = nn.Linear(num_heads * head_dim, d_model, bias=False)

    def forward(self, hidden: Tensor, memory: Tensor | None, bias: Tensor | None, cache: TwoCaches | None) -> Tensor:
        """``hidden`` (batch, seq, d_model) -> same; it looks at itself, or at ``memory`` (batch, keys, d_model)."""
        q_BHSd = self._heads(self.query(hidden))
        k_BHKd, v_BHKd = self._keys_and_values(hidden, memory, cache)
        bias = bias if bias is None else bias.to(q_BHSd.dtype)
        out_BHSd = self.attend(q_BHSd, k_BHKd, v_BHKd, bias)
        return self.out(out_BHSd.transpose(1, 2).flatten(2))

    def _keys_and_values(self, hidden: Tensor, memory: Tensor | None, cache: TwoCaches | None) -> tuple[Tensor, Tensor]:
        if memory is not None and cache is not None and cache.is_updated.get(self.layer):
            known = cache.cross_attention_cache.layers[self.layer]
            return known.keys, known.values
        seen = hidden if memory is None else memory
        keys, values = self._heads(self.key(seen)), self._heads(self.value(seen))
        if cache is None:
            return keys, values
        if memory is None:
            return cache.self_attention_cache.update(keys, values, self.layer)
        cache.is_updated[self.layer] = True
        return cache.cross_attention_cache.update(keys, values, self.layer)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class RelativeBlock(nn.Module):
    """Attention, in a decoder also attention on the encoder, then a feed-forward, each behind a pre-norm.

    ``extra`` is a dense feed-forward behind a sparse one.
    """

    def __init__(
        self,
        attention: nn.Module,
        cross_attention: nn.Module | None,
        feed_forward: nn.Module,
        extra: nn.Module | None,
        make_norm: Callable[[], nn.Module],
    ):
        super().__init__()
        self.attention_norm, self.attention = make_norm(), attention
        self.cross_norm = make_norm() if cross_attention is not None else None
        self.cross_attention = cross_attention
        self.feed_forward_norm, self.feed_forward = make_norm(), feed_forward
        self.extra_norm, self.extra = make_norm() if extra is not None else None, extra

    def forward(
        self,
        hidden: Tensor,
        memory: Tensor | None,
        bias: Tensor,
        memory_bias: Tensor | None,
        row_seeds: Tensor | None,
        cache: TwoCaches | None,
    ) -> tuple[Tensor, RouterStats | None]:
        """``hidden`` (batch, seq, d_model) -> same shape; ``memory`` is None in an encoder.

        ``memory_bias`` hides padding from the attention on the encoder. The statistics are None in a dense block.
        """
        hidden = hidden + self.attention(self.attention_norm(hidden), None, bias, cache)
        if self.cross_attention is not None:
            hidden = hidden + self.cross_attention(self.cross_norm(hidden), memory, memory_bias, cache)
        normed = self.feed_forward_norm(hidden)
        if not isinstance(self.feed_forward, MoELayer):
            return hidden + self.feed_forward(normed), None
        update, stats = self.feed_forward(normed, row_seeds)
        hidden = hidden + update
        return (hidden if self.extra is None else hidden + self.extra(self.extra_norm(hidden))), stats
