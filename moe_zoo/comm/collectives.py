"""Collectives whose backward is their true adjoint: what exact gradients rest on in every layout."""

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed them, and warns of the old names.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send, receive, group):
        ctx.rest = (receive, send, group)
        out = rows.new_empty(len(rows) if receive is None else sum(receive), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad, *ctx.rest), None, None, None


class _Along(torch.autograd.Function):
    """Concatenate along ``dim`` over the group, or sum and keep the own part: each is the other's adjoint."""

    @staticmethod
    def forward(ctx, x, dim, group, is_gather):
        ctx.rest = (dim, group, not is_gather)
        x, ranks = x.movedim(dim, 0).contiguous(), group.size()
        rows = x.shape[0] * ranks if is_gather else x.shape[0] // ranks
        out = x.new_empty(rows, *x.shape[1:])
        (_ALL_GATHER if is_gather else _REDUCE_SCATTER)(out, x, group=group)
        return out.movedim(0, dim).contiguous()  # pipeline sends refuse strides

    @staticmethod
    def backward(ctx, grad):
        return _Along.apply(grad, *ctx.rest), None, None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return sum_over(x, group)

    @staticmethod
    def backward(ctx, grad):
        return sum_over(grad, ctx.group), None


def all_to_all(rows: Tensor, send: list[int] | None, receive: list[int] | None, group: dist.ProcessGroup) -> Tensor:
    """Send ``send[r]`` rows to rank r of ``group`` and get ``receive[r]`` rows from it; the gradient travels back.

    None in both: equal parts.
    """
    return _AllToAll.apply(rows, send, receive, group)


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate every rank's ``x`` along ``dim``, in rank order."""
    return x if group.size() == 1 else _Along.apply(x, dim, group, True)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum ``x`` over the ranks and keep this rank's part along ``dim``."""
    return x if group.size() == 1 else _Along.apply(x, dim, group, False)


def mean(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean of every rank's ``x``, on every rank."""
    return x if group.size() == 1 else _AllReduce.apply(x, group) / group.size()


def swap(x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    """Give each rank its part of dimension ``split`` and get its part of dimension ``join``; ranks in order."""
    ranks = group.size()
    if ranks == 1:
        return x
    parts = torch.stack(x.chunk(ranks, dim=split))
    return torch.cat(all_to_all(parts, [1] * ranks, [1] * ranks, group).unbind(), dim=join)


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(ranks, n) integers, row r for rank r -> row r from rank r. No gradient."""
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    return received


def exchange(value: Tensor, peer: int, group: dist.ProcessGroup) -> Tensor:
    """What rank ``peer`` of ``group`` has in place of ``value``, which it gets. No gradient."""
    theirs = torch.empty_like(value)
    sends = dist.P2POp(dist.isend, value.contiguous(), group=group, group_peer=peer)
    receives = dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer)
    for work in dist.batch_isend_irecv([sends, receives]):
        work.wait()
    return theirs


def sum_over(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """A summed copy of ``value`` over ``group`` (None: the world). No gradient."""
    total = value.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def max_over(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest of each element over ``group``. No gradient."""
    largest = value.detach().clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest
