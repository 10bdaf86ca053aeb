"""Static capacity: every expert has as many places as capacity allows, filled or not. Shapes depend on no data.

Letters: T tokens, D width, K choices, E experts times slices, e experts on this rank, P places per expert and rank,
N = T*K slots, r ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from moe_zoo.comm.collectives import all_to_all
from moe_zoo.layers.dispatch.all_to_all import AllToAllDispatcher
from moe_zoo.layers.dispatch.local import LocalDispatcher
from moe_zoo.layers.experts import Experts
from moe_zoo.layers.router import Routing
from moe_zoo.ops.slots import place_slots, visit_slices


class PaddedDispatcher:
    """Buffers of ``routing.num_places`` per expert and rank, exchanged whole, multiplied in a batch, with no host sync.

    Every rank of ``group`` (None: all experts live here) brings equally many rows of equal length. Where the router
    has no capacity, as in an evaluation that drops nobody, the exact dispatcher answers: the only static bound would
    be a place for every token at every expert. Source: GShard, arXiv:2006.16668, section 3.1; Switch,
    arXiv:2101.03961, section 2.2.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup | None, slices: int = 1):
        self.num_experts, self.group, self.slices = num_experts, group, slices
        self.exact = LocalDispatcher() if group is None else AllToAllDispatcher(num_experts, group, slices)
        self.num_own = num_experts if group is None else self.exact.num_own

    def __call__(self, x_TD: Tensor, routing: Routing, experts: Experts) -> Tensor:
        P = routing.num_places
        if P is None:
            return self.exact(x_TD, routing, experts)
        experts_TK, weights_TK = visit_slices(
            routing.experts_TK, routing.weights_TK, self.num_experts, self.num_own, self.slices
        )
        (T, K), D, E = experts_TK.shape, x_TD.shape[1], self.num_experts * self.slices
        places_N = place_slots(experts_TK, E, P)
        rows_ND = x_TD[:, None].expand(T, K, D).reshape(T * K, D)
        x_EPD = x_TD.new_zeros(E * P + 1, D).index_copy_(0, places_N, rows_ND)[:-1].view(E, P, D)  # last: the dropped

        y_EPD = self._to_ranks(experts(self._to_experts(x_EPD)), P)

        is_kept_TK = experts_TK < E
        y_TKD = y_EPD.flatten(0, 1).index_select(0, places_N.clamp_max(E * P - 1)).view(T, K, D)
        return torch.einsum("tkd,tk->td", y_TKD, weights_TK.to(y_TKD.dtype) * is_kept_TK)

    def _to_experts(self, x_EPD: Tensor) -> Tensor:
        """(E, P, D), for all experts from this rank -> (e, r * P, D), for this rank's experts from all ranks."""
        if self.group is None:
            return x_EPD
        x_rePD = all_to_all(x_EPD, None, None, self.group).unflatten(0, (self.group.size(), -1))
        return x_rePD.transpose(0, 1).flatten(1, 2)

    def _to_ranks(self, y_eRD: Tensor, num_places: int) -> Tensor:
        """The way back."""
        if self.group is None:
            return y_eRD
        y_rePD = y_eRD.unflatten(1, (-1, num_places)).transpose(0, 1)
        return all_to_all(y_rePD.flatten(0, 1), None, None, self.group)
