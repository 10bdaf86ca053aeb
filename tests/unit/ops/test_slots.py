"""Rows to slots and back equal a gather, a product and a sum under autograd."""

import pytest
import torch

from moe_zoo.ops.slots import RowsToSlots, SlotsToRows

T, K, D = 7, 3, 5


@pytest.mark.parametrize("num_sent", [T * K, T * K - 4, 1, 0])
def test_there_and_back_as_autograd_does_it(num_sent):
    torch.manual_seed(0)
    order = torch.randperm(T * K)
    x = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(T, K, dtype=torch.float64, requires_grad=True)
    sent = order[:num_sent]

    rows = RowsToSlots.apply(x, order, K, num_sent)
    ours = SlotsToRows.apply(rows.sin(), weights, order)

    plain = x[sent // K]
    truth = torch.zeros_like(x).index_add(0, sent // K, plain.sin() * weights.flatten()[sent][:, None])

    torch.testing.assert_close(ours, truth)
    seed = torch.randn(T, D, dtype=torch.float64)
    grads = [torch.autograd.grad(out, (x, weights), seed) for out in (ours, truth)]
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)
