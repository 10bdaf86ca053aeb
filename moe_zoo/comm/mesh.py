"""The mesh: which ranks hold the same slice of a parameter, and which exchange tokens.

``rank = edp_rank * ep + ep_rank``: the ranks that share a set of experts are neighbours, so ep stays inside a node
where it fits. A parameter's gradient is the sum over its REPLICA GROUP, the ranks that hold the same slice of it:
all of them for a whole tensor (kind ``stage``), the edp ranks for an expert stack (kind ``ep``).
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
        self.dp, self.dp_rank = layout.dp, self.rank
        self.ep, self.ep_rank = layout.ep, self.rank % layout.ep
        grid = torch.arange(self.world).view(layout.edp, layout.ep)
        self.stage_group = _own_group([grid.flatten().tolist()])
        self.ep_group = _own_group(grid.tolist())
        edp_group = _own_group(grid.t().tolist())
        self.replicas = {"stage": self.stage_group, "ep": edp_group}

    def slice_of(self, kind: str) -> tuple[int, int]:
        """(number of slices, own slice) of a parameter of this kind."""
        return {"stage": (1, 0), "ep": (self.ep, self.ep_rank)}[kind]


def _own_group(rank_lists: list[list[int]]) -> dist.ProcessGroup:
    made = [dist.new_group(ranks) for ranks in rank_lists]
    return next(group for ranks, group in zip(rank_lists, made, strict=True) if dist.get_rank() in ranks)
