"""One decoder layer: attention, then a dense or sparse feed-forward, each behind a pre-norm; or two beside a sparse one."""

from torch import Tensor, nn

from moe_zoo.layers.attention import KeyValueCache
from moe_zoo.layers.moe import MoELayer
from moe_zoo.layers.router import RouterStats
from moe_zoo.ops.rope import Places


class DecoderBlock(nn.Module):
    """``hidden + scale * attention(norm(hidden))``, then the same with the feed-forward."""

    def __init__(
        self,
        attention: nn.Module,
        feed_forward: nn.Module,
        attention_norm: nn.Module,
        ffn_norm: nn.Module,
        scale: float = 1.0,
    ):
        super().__init__()
        self.scale = scale
        self.attention_norm, self.attention = attention_norm, attention
        self.feed_forward_norm, self.feed_forward = ffn_norm, feed_forward

    def forward(
        self,
        hidden: Tensor,
        places: Places,
        mask: Tensor | None,
        row_seeds: Tensor | None,
        cache: KeyValueCache | None,
    ) -> tuple[Tensor, RouterStats | None]:
        """``hidden`` (batch, seq, d_model) -> same shape; the statistics are None in a dense block."""
        hidden = self.attended(hidden, places, mask, cache)
        normed = self.feed_forward_norm(hidden)
        if not isinstance(self.feed_forward, MoELayer):
            return hidden + self._scaled(self.feed_forward(normed)), None
        update, stats = self.feed_forward(normed, row_seeds)
        return hidden + self._scaled(update), stats

    def attended(self, hidden: Tensor, places: Places, mask: Tensor | None, cache: KeyValueCache | None) -> Tensor:
        """The first half of the block."""
        return hidden + self._scaled(self.attention(self.attention_norm(hidden), places, mask, cache))

    def _scaled(self, update: Tensor) -> Tensor:
        return update if self.scale == 1.0 else update * self.scale


class ShortcutBlock(nn.Module):
    """Two dense blocks, and a sparse feed-forward beside all that follows the first attention.

    It reads what the first dense feed-forward reads, and is added behind the second: experts may work and tokens travel
    while three dense layers run. Source: arXiv:2404.05019; LongCat-Flash, arXiv:2509.01322.
    """

    def __init__(self, first: DecoderBlock, second: DecoderBlock, sparse: MoELayer):
        super().__init__()
        self.first, self.second, self.sparse = first, second, sparse

    def forward(
        self,
        hidden: Tensor,
        places: Places,
        mask: Tensor | None,
        row_seeds: Tensor | None,
        cache: KeyValueCache | None,
    ) -> tuple[Tensor, RouterStats | None]:
        """``hidden`` (batch, seq, d_model) -> same shape."""
        hidden = self.first.attended(hidden, places, mask, cache)
        normed = self.first.feed_forward_norm(hidden)
        shortcut, stats = self.sparse(normed, row_seeds)
        hidden, _ = self.second(hidden + self.first.feed_forward(normed), places, mask, None, cache)
        return hidden + shortcut, stats
