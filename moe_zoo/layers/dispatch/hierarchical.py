"""Two hops: across nodes once per token and node, then among the ranks of the node.

Letters: T tokens, D width, K choices, n nodes, N rows sent across, R rows received.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from moe_zoo.comm.collectives import all_to_all, exchange_counts
from moe_zoo.layers.dispatch.all_to_all import AllToAllDispatcher
from moe_zoo.layers.experts import Experts
from moe_zoo.layers.router import Routing
from moe_zoo.ops.experts import host_counts


class HierarchicalDispatcher:
    """A token crosses to a node once, however many of its experts live there, and one weighted sum comes back.

    ``outer`` joins the ranks of equal place in every node, ``inner`` the ranks of this node. Experts are spread in the
    order node, rank of the node; a node holds whole experts, whose ``slices`` are neighbours. Where experts choose,
    each copy of a token crosses for itself. Source: DeepSeek-V3, arXiv:2412.19437, section 3.2.2.
    """

    def __init__(self, num_experts: int, inner: dist.ProcessGroup, outer: dist.ProcessGroup, slices: int = 1):
        assert inner.size() % slices == 0, (inner.size(), slices)
        self.outer, self.num_per_node = outer, num_experts // outer.size()
        self.within = AllToAllDispatcher(self.num_per_node, inner, slices)

    def __call__(self, x_TD: Tensor, routing: Routing, experts: Experts) -> Tensor:
        nodes_TK = routing.experts_TK // self.num_per_node  # a dropped slot's node is one past the last
        order_N, sent_n = self._visits(nodes_TK)
        received_n = exchange_counts(sent_n[:, None], self.outer)[:, 0]
        send, receive = host_counts(sent_n), host_counts(received_n)
        visits_N = order_N[: sum(send)]
        node_N1, tokens_N = (visits_N // len(x_TD))[:, None], visits_N % len(x_TD)

        is_there_NK = nodes_TK[tokens_N] == node_N1
        ids_NK = (routing.experts_TK[tokens_N] % self.num_per_node).where(is_there_NK, self.num_per_node)
        sent = (x_TD.index_select(0, tokens_N), ids_NK, routing.weights_TK.index_select(0, tokens_N))
        x_RD, ids_RK, weights_RK = (all_to_all(rows, send, receive, self.outer) for rows in sent)
        y_RD = self.within(x_RD, routing._replace(experts_TK=ids_RK, weights_TK=weights_RK), experts)
        y_ND = all_to_all(y_RD, receive, send, self.outer)
        return torch.zeros_like(x_TD).index_add(0, tokens_N, y_ND)

    def _visits(self, nodes_TK: Tensor) -> tuple[Tensor, Tensor]:
        """(node, token) pairs as ``node * T + token``, those that happen first and by node, and how many per node."""
        wanted_Tn = torch.zeros(len(nodes_TK), self.outer.size() + 1, dtype=torch.bool, device=nodes_TK.device)
        wanted_nT = wanted_Tn.scatter_(1, nodes_TK, True)[:, :-1].t()
        return (~wanted_nT).flatten().to(torch.uint8).argsort(stable=True), wanted_nT.sum(1)
