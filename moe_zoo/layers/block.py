"""One decoder layer: attention, then a dense or sparse feed-forward, each behind a pre-norm."""

from torch import Tensor, nn

from moe_zoo.layers.attention import KeyValueCache
from moe_zoo.layers.moe import MoELayer
from moe_zoo.layers.router import RouterStats


class DecoderBlock(nn.Module):
    """``hidden + attention(norm(hidden))``, then the same with the feed-forward."""

    def __init__(self, attention: nn.Module, feed_forward: nn.Module, attention_norm: nn.Module, ffn_norm: nn.Module):
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.feed_forward_norm, self.feed_forward = ffn_norm, feed_forward

    def forward(
        self,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        mask: Tensor | None,
        row_seeds: Tensor | None,
        cache: KeyValueCache | None,
    ) -> tuple[Tensor, RouterStats | None]:
        """``hidden`` (batch, seq, d_model) -> same shape; the statistics are None in a dense block."""
        hidden = hidden + self.attention(self.attention_norm(hidden), angles, mask, cache)
        normed = self.feed_forward_norm(hidden)
        if not isinstance(self.feed_forward, MoELayer):
            return hidden + self.feed_forward(normed), None
        update, stats = self.feed_forward(normed, row_seeds)
        return hidden + update, stats
