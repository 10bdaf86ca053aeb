"""Bring tokens to experts and back: the one seam between routing and the network.

``local`` knows one device, the other files a group of ranks; all of them give the same answer.
"""

import torch.distributed as dist

from moe_zoo.layers.dispatch.all_to_all import AllToAllDispatcher
from moe_zoo.layers.dispatch.hierarchical import HierarchicalDispatcher
from moe_zoo.layers.dispatch.local import Dispatcher, LocalDispatcher
from moe_zoo.layers.dispatch.padded import PaddedDispatcher

__all__ = [
    "AllToAllDispatcher",
    "Dispatcher",
    "HierarchicalDispatcher",
    "LocalDispatcher",
    "PaddedDispatcher",
    "make_dispatcher",
]


def make_dispatcher(
    kind: str,
    num_experts: int,
    *,
    group: dist.ProcessGroup | None = None,
    inner: dist.ProcessGroup | None = None,
    outer: dist.ProcessGroup | None = None,
    slices: int = 1,
) -> Dispatcher:
    """The dispatcher of a layer of ``num_experts`` over all ranks.

    ``exact`` and ``padded`` want ``group``, the ep * slices ranks over which experts are spread, rank = ep rank *
    slices + slice; None where every expert lives here. ``hierarchical`` wants its two factors: ``inner``, the ranks of
    this node, and ``outer``, the ranks of equal place in every node, with rank = node * ranks per node + place.
    ``slices`` ranks share an expert's hidden units (expert-tensor parallelism).
    """
    if kind == "hierarchical":
        return HierarchicalDispatcher(num_experts, inner, outer, slices)
    if kind == "padded":
        return PaddedDispatcher(num_experts, group, slices)
    assert kind == "exact", kind
    return LocalDispatcher() if group is None else AllToAllDispatcher(num_experts, group, slices)
