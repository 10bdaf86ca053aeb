"""Experts spread over ranks: just the rows that were chosen travel, so their number must reach the host.

Letters: T tokens, D width, K choices, E experts times slices, e experts on this rank, N slots sent, R rows received,
r ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from moe_zoo.comm.collectives import all_to_all, exchange_counts
from moe_zoo.layers.experts import Experts
from moe_zoo.layers.router import Routing
from moe_zoo.ops.experts import host_counts, inverse_permutation, sort_slots
from moe_zoo.ops.slots import visit_slices


class AllToAllDispatcher:
    """Experts are spread over ``group``, equally many per rank, in rank order; ``slices`` neighbours share each."""

    def __init__(self, num_experts: int, group: dist.ProcessGroup, slices: int = 1):
        self.num_experts, self.group, self.slices = num_experts, group, slices
        self.num_own = num_experts * slices // group.size()

    def __call__(self, x_TD: Tensor, routing: Routing, experts: Experts) -> Tensor:
        experts_TK, weights_TK = visit_slices(
            routing.experts_TK, routing.weights_TK, self.num_experts, self.num_own, self.slices
        )
        T, K = experts_TK.shape
        order_N, counts_E = sort_slots(experts_TK, self.num_experts * self.slices)
        sent_re = counts_E.view(self.group.size(), -1)
        received_re = exchange_counts(sent_re, self.group)
        send, receive = (host_counts(counts.sum(1)) for counts in (sent_re, received_re))
        slots_N = order_N[: sum(send)]  # dropped slots sort last and stay at home

        x_RD = all_to_all(x_TD.index_select(0, slots_N // K), send, receive, self.group)
        ids_e = torch.arange(self.num_own, device=x_TD.device).repeat(self.group.size())
        expert_R1 = ids_e.repeat_interleave(received_re.flatten(), output_size=sum(receive))[:, None]
        y_ND = all_to_all(experts(x_RD, expert_R1), receive, send, self.group)

        y_ND = torch.cat((y_ND, y_ND.new_zeros(T * K - len(y_ND), y_ND.shape[1])))
        y_TKD = y_ND.index_select(0, inverse_permutation(order_N)).view(T, K, y_ND.shape[1])
        return torch.einsum("tkd,tk->td", y_TKD, weights_TK.to(y_TKD.dtype))
