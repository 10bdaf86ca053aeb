"""The mesh: which ranks hold the same slice of a parameter, and which exchange tokens.

``rank = (pp_rank * edp + edp_rank) * ep + ep_rank``: the ranks that share a set of experts are neighbours, so ep stays
inside a node where it fits; pipeline ranks are farthest apart. A parameter's gradient is the sum over its REPLICA GROUP,
the ranks of its stage that hold the same slice of it: all of them for a whole tensor (kind ``stage``), the edp ranks for
an expert stack (kind ``ep``).
"""

import torch
import torch.distributed as dist

from moe_zoo.spec.layout import ParallelLayout


class Mesh:
    """Sizes, own ranks and process groups of a layout. Every rank builds every group, in the same order."""

    def __init__(self, layout: ParallelLayout, device: torch.device):
        assert layout.world == dist.get_world_size(), (layout, dist.get_world_size())
        self.layout, self.device = layout, device
        self.rank, self.world = dist.get_rank(), layout.world
        self.pp, self.dp, self.ep = layout.pp, layout.dp, layout.ep
        self.pp_rank, self.dp_rank = divmod(self.rank, layout.dp)
        self.ep_rank = self.rank % layout.ep
        grid = torch.arange(self.world).view(layout.pp, layout.edp, layout.ep)
        self.stage_group = _own_group(grid.flatten(1).tolist())
        self.pp_group = _own_group(grid.flatten(1).t().tolist())
        self.ep_group = _own_group(grid.flatten(0, 1).tolist())
        edp_group = _own_group(grid.transpose(1, 2).flatten(0, 1).tolist())
        self.replicas = {"stage": self.stage_group, "ep": edp_group}


def _own_group(rank_lists: list[list[int]]) -> dist.ProcessGroup:
    made = [dist.new_group(ranks) for ranks in rank_lists]
    return next(group for ranks, group in zip(rank_lists, made, strict=True) if dist.get_rank() in ranks)
