"""What a dispatcher is, and the one that needs no network. Letters: T tokens, D width."""

from typing import Protocol

from torch import Tensor

from moe_zoo.layers.experts import Experts
from moe_zoo.layers.router import Routing


class Dispatcher(Protocol):
    """Tokens in, weighted expert outputs back, in the tokens' order."""

    def __call__(self, x_TD: Tensor, routing: Routing, experts: Experts) -> Tensor: ...


class LocalDispatcher:
    """Every expert lives here: gather, compute and combine are one function. The truth for all others."""

    def __call__(self, x_TD: Tensor, routing: Routing, experts: Experts) -> Tensor:
        return experts(x_TD, routing.experts_TK, routing.weights_TK)
