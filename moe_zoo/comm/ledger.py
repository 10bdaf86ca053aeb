"""What a piece of code moves over the network: every collective, with its group and bytes, as it is called."""

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed._tools.fake_collectives import CollectiveOp  # private: it knows which argument is the group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

KINDS = {  # operator of c10d -> (name, what a rank sends in a ring, over the bytes of the larger side)
    "_allgather_base_": ("all_gather", 1.0),
    "allgather_": ("all_gather", 1.0),
    "allgather_into_tensor_coalesced_": ("all_gather", 1.0),
    "_reduce_scatter_base_": ("reduce_scatter", 1.0),
    "reduce_scatter_": ("reduce_scatter", 1.0),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1.0),
    "allreduce_": ("all_reduce", 2.0),
    "reduce_": ("reduce", 1.0),
    "alltoall_base_": ("all_to_all", 1.0),
    "alltoall_": ("all_to_all", 1.0),
    "broadcast_": ("broadcast", 1.0),
    "send": ("send", 1.0),
}
SILENT = ("recv_", "barrier", "monitored_barrier_")  # the sender counts; nothing is carried


class Move(NamedTuple):
    """One collective of this rank."""

    kind: str
    ranks: tuple[int, ...]  # of its group
    sent_bytes: float  # by this rank, if all ranks are served alike


class Ledger(TorchDispatchMode):
    """``with Ledger() as ledger: ...`` fills ``ledger.moves``. Real tensors or fake ones."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[Move] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and func._opname not in SILENT:
            self.moves.append(_move(func, args))
        return out

    def total_bytes(self) -> dict[tuple[tuple[int, ...], str], float]:
        """Bytes sent, by (ranks of the group, kind)."""
        totals: dict[tuple[tuple[int, ...], str], float] = {}
        for move in self.moves:
            key = move.ranks, move.kind
            totals[key] = totals.get(key, 0.0) + move.sent_bytes
        return totals


def _move(func, args) -> Move:
    kind, factor = KINDS[func._opname]
    ranks = tuple(dist.get_process_group_ranks(CollectiveOp.get_process_group(func, args)))
    sides = [[tensor for tensor in tree_iter(side) if isinstance(tensor, Tensor)] for side in args[:2]]
    size = max(sum(tensor.numel() * tensor.element_size() for tensor in side) for side in sides)
    others = 1.0 if kind == "send" else (len(ranks) - 1) / len(ranks)
    return Move(kind, ranks, factor * others * size)
