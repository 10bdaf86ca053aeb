"""Collectives whose backward is their true adjoint: what exact gradients rest on in every layout."""

import torch
import torch.distributed as dist
from torch import Tensor


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


def all_to_all(rows: Tensor, send: list[int] | None, receive: list[int] | None, group: dist.ProcessGroup) -> Tensor:
    """Send ``send[r]`` rows to rank r of ``group`` and get ``receive[r]`` rows from it; the gradient travels back.

    None in both: equal parts.
    """
    return _AllToAll.apply(rows, send, receive, group)


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(ranks, n) integers, row r for rank r -> row r from rank r. No gradient."""
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    return received


def sum_over(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """A summed copy of ``value`` over ``group`` (None: the world). No gradient."""
    total = value.detach().clone()
    dist.all_reduce(total, group=group)
    return total
