"""The sparse feed-forward layer: route, dispatch, compute, combine. Letters: T tokens, D width, N slots."""

import torch
from torch import Tensor, nn

from moe_zoo.layers.dispatch.local import Dispatcher, LocalDispatcher
from moe_zoo.layers.experts import Experts
from moe_zoo.layers.feed_forward import FeedForward
from moe_zoo.layers.router import RouterStats, Routing, TopKRouter


class MoELayer(nn.Module):
    """Drop-in replacement for a dense feed-forward layer, with an optional expert that every token visits.

    Knows nothing of ranks. ``moe_zoo.parallel`` slices ``experts`` and swaps ``dispatcher`` for one that crosses the
    network; the maths below does not change.
    """

    dispatcher: Dispatcher

    def __init__(
        self,
        router: TopKRouter,
        experts: Experts,
        shared: FeedForward | None = None,
        shared_gate: nn.Linear | None = None,
    ):
        super().__init__()
        self.router, self.experts = router, experts
        self.shared, self.shared_gate = shared, shared_gate
        self.dispatcher = LocalDispatcher()

    def forward(self, hidden: Tensor, row_seeds: Tensor | None) -> tuple[Tensor, RouterStats]:
        """``hidden`` (batch, seq, d_model) -> the same shape, plus what the router decided."""
        routing = self.router(hidden, row_seeds)
        update = self._routed(hidden.flatten(0, 1), routing).view_as(hidden)
        if self.shared is not None:
            everybody = self.shared(hidden)
            update = update + (
                everybody if self.shared_gate is None else everybody * self.shared_gate(hidden).sigmoid()
            )
        return update, routing.stats

    def _routed(self, x_TD: Tensor, routing: Routing) -> Tensor:
        if self.router.scales_input:
            x_TD = x_TD * routing.weights_TK.to(x_TD.dtype)
            routing = routing._replace(weights_TK=torch.ones_like(routing.weights_TK))
        if routing.tokens_N is None:
            update_TD = self.dispatcher(x_TD, routing, self.experts)
            return update_TD if routing.kept_T is None else update_TD + x_TD * routing.kept_T[:, None].to(x_TD.dtype)
        rows_ND = self.dispatcher(x_TD.index_select(0, routing.tokens_N), routing, self.experts)
        return torch.zeros_like(x_TD).index_add(0, routing.tokens_N, rows_ND)
