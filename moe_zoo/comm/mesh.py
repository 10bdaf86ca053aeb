"""The mesh: which ranks hold the same slice of a parameter, and which exchange tokens, keys or partial sums.

``rank = (((pp * replicate + pod) * dp_of_pod + dp) * cp + cp_rank) * tp + tp_rank``: tp ranks are neighbours, pipeline
ranks are farthest apart. For experts, ``ep * etp`` consecutive ranks of a pod hold one set, so ep stays inside a node
where it fits, and may span tp, cp and dp.

A parameter's gradient is the sum over the ranks of its stage that hold the same slice of it. Inside a pod these are its
REPLICA GROUP, over which an engine shards it; across pods, ``across_pods``.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from moe_zoo.spec.layout import ParallelLayout


class Mesh:
    """Sizes, own ranks and process groups of a layout. Every rank builds every group, in the same order."""

    def __init__(self, layout: ParallelLayout, device: torch.device, timeout_s: float = 1800.0):
        assert layout.world == dist.get_world_size(), (layout, dist.get_world_size())
        self.layout, self.device, self.timeout = layout, device, timedelta(seconds=timeout_s)
        self.rank, self.world = dist.get_rank(), layout.world
        self.pp, self.dp, self.cp, self.tp = layout.pp, layout.dp, layout.cp, layout.tp
        self.ep, self.etp, self.kv_parts = layout.ep, layout.etp, layout.kv_parts
        self._find_own_ranks()
        self._made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}
        self._make_groups()

    def _find_own_ranks(self) -> None:
        layout = self.layout
        self.pp_rank, self.stage_rank = divmod(self.rank, layout.stage_size)
        self.pod, self.pod_rank = divmod(self.stage_rank, layout.pod_size)
        self.dp_rank, self.seq_rank = divmod(self.stage_rank, layout.cp * layout.tp)
        self.cp_rank, self.tp_rank = divmod(self.seq_rank, layout.tp)
        self.kv_rank = self.tp_rank * self.kv_parts // self.tp
        self.ep_rank, self.etp_rank = divmod(self.pod_rank % (layout.ep * layout.etp), layout.etp)

    def _make_groups(self) -> None:
        layout, cp, tp = self.layout, self.cp, self.tp
        world = torch.arange(self.world)
        pods = world.view(self.pp, layout.replicate, -1)
        seqs = pods.view(self.pp, layout.replicate, -1, cp, self.kv_parts, tp // self.kv_parts)
        experts = pods.view(self.pp, layout.replicate, -1, layout.ep * layout.etp)
        self.stage_group = self._own(world, layout.stage_size)
        self.pod_group = self._own(world, layout.pod_size)
        self.pp_group = self._own(world.view(self.pp, -1).t(), self.pp)
        self.across_pods = self._own(pods.transpose(1, 2), layout.replicate)
        self.seq_group = self._own(world, cp * tp)
        self.tp_group = self._own(world, tp)
        self.cp_group = self._own(seqs.movedim(3, -1), cp)
        self.ep_group = self._own(world, layout.ep * layout.etp)
        if layout.ep_nodes > 1:  # place in a node, and the ranks of equal place in all nodes of an ep group
            nodes = world.view(-1, layout.ep_nodes, layout.ep * layout.etp // layout.ep_nodes)
            self.ep_in_node = self._own(nodes, nodes.shape[2])
            self.ep_across = self._own(nodes.transpose(1, 2), layout.ep_nodes)
        self.replicas = {  # of each kind of parameter: the ranks of the pod that hold the same slice
            "stage": self.pod_group,
            "tp": self._own(seqs.permute(0, 1, 4, 5, 2, 3), layout.pod_size // tp),
            "kv": self._own(seqs.permute(0, 1, 4, 2, 3, 5), layout.pod_size // self.kv_parts),
            "ep": self._own(experts.transpose(2, 3), layout.pod_size // (layout.ep * layout.etp)),
        }

    def _own(self, ranks: Tensor, size: int) -> dist.ProcessGroup:
        """The group of ``size`` consecutive entries of ``ranks`` in which this rank stands."""
        lists = tuple(map(tuple, ranks.reshape(-1, size).tolist()))
        if lists not in self._made:  # the same split may be asked for under several names
            groups = [dist.new_group(members, timeout=self.timeout) for members in lists]
            self._made[lists] = next(
                group for members, group in zip(lists, groups, strict=True) if self.rank in members
            )
        return self._made[lists]
