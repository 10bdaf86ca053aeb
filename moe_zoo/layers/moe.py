"""The sparse feed-forward layer: route, dispatch, compute, combine."""

from torch import Tensor, nn

from moe_zoo.layers.dispatch import Dispatcher, LocalDispatcher
from moe_zoo.layers.experts import Experts
from moe_zoo.layers.feed_forward import FeedForward
from moe_zoo.layers.router import RouterStats, TopKRouter


class MoELayer(nn.Module):
    """Drop-in replacement for a dense feed-forward layer, with an optional expert that every token visits.

    Knows nothing of ranks. ``moe_zoo.parallel`` slices ``experts`` and swaps ``dispatcher`` for one that crosses the
    network; the maths below does not change.
    """

    dispatcher: Dispatcher

    def __init__(self, router: TopKRouter, experts: Experts, shared: FeedForward | None = None):
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared
        self.dispatcher = LocalDispatcher()

    def forward(self, hidden: Tensor, row_seeds: Tensor | None) -> tuple[Tensor, RouterStats]:
        """``hidden`` (batch, seq, d_model) -> the same shape, plus what the router decided."""
        routing = self.router(hidden, row_seeds)
        update = self.dispatcher(hidden.flatten(0, 1), routing, self.experts).view_as(hidden)
        if self.shared is not None:
            update = update + self.shared(hidden)
        return update, routing.stats
