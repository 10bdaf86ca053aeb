"""Bring tokens to experts and back: the one seam between routing and the network.

Letters: T tokens, D width, K choices, E experts, e experts on this rank, N slots sent, R rows received.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe_zoo.comm.collectives import all_to_all, exchange_counts
from moe_zoo.layers.experts import Experts
from moe_zoo.layers.router import Routing
from moe_zoo.ops.experts import host_counts, inverse_permutation, sort_slots


class Dispatcher(Protocol):
    """Tokens in, weighted expert outputs back, in the tokens' order."""

    def __call__(self, x_TD: Tensor, routing: Routing, experts: Experts) -> Tensor: ...


class LocalDispatcher:
    """Every expert lives here: gather, compute and combine are one function. The truth for all others."""

    def __call__(self, x_TD: Tensor, routing: Routing, experts: Experts) -> Tensor:
        return experts(x_TD, routing.experts_TK, routing.weights_TK)


class AllToAllDispatcher:
    """Experts are spread over ``group``, equally many per rank, in rank order."""

    def __init__(self, num_experts: int, group: dist.ProcessGroup):
        self.num_experts, self.group = num_experts, group

    def __call__(self, x_TD: Tensor, routing: Routing, experts: Experts) -> Tensor:
        T, K = routing.experts_TK.shape
        order_N, counts_E = sort_slots(routing.experts_TK, self.num_experts)
        sent_re = counts_E.view(self.group.size(), -1)
        received_re = exchange_counts(sent_re, self.group)
        send, receive = (host_counts(counts.sum(1)) for counts in (sent_re, received_re))
        slots_N = order_N[: sum(send)]  # dropped slots sort last and stay at home

        x_RD = all_to_all(x_TD.index_select(0, slots_N // K), send, receive, self.group)
        ids_e = torch.arange(received_re.shape[1], device=x_TD.device).repeat(self.group.size())
        expert_R1 = ids_e.repeat_interleave(received_re.flatten(), output_size=sum(receive))[:, None]
        y_ND = all_to_all(experts(x_RD, expert_R1), receive, send, self.group)

        y_ND = torch.cat((y_ND, y_ND.new_zeros(T * K - len(y_ND), y_ND.shape[1])))
        y_TKD = y_ND.index_select(0, inverse_permutation(order_N)).view(T, K, y_ND.shape[1])
        return torch.einsum("tkd,tk->td", y_TKD, routing.weights_TK.to(y_TKD.dtype))
