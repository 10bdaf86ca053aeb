"""Attention equals its slow twin, values and gradients: windows, sinks, caches, masks, values of their own width."""

import pytest
import torch

from moe_zoo.ops import reference
from moe_zoo.ops.attention import attend

B, H, G, d, v = 2, 4, 2, 6, 5


def inputs(num_queries: int, num_keys: int):
    generator = torch.Generator().manual_seed(4)
    shapes = (B, H, num_queries, d), (B, G, num_keys, d), (B, G, num_keys, v), (H,)
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def slow(q, k, values, window, sinks, scale):
    shared = (x.repeat_interleave(H // G, dim=1) for x in (k, values))
    return reference.attention(q, *shared, scale, window, sinks)


@pytest.mark.parametrize("window", [None, 1, 3, 9, 40])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(9, 9), (1, 9), (4, 9)])
def test_attention_equals_the_slow_twin(num_queries, num_keys, has_sinks, window):
    q, k, values, sinks = inputs(num_queries, num_keys)
    leaves = [q, k, values, *([sinks] if has_sinks else [])]
    sinks_H = sinks if has_sinks else None
    outs = (
        attend(q, k, values, None, scale=0.3, window=window, sinks_H=sinks_H),
        slow(q, k, values, window, sinks_H, 0.3),
    )
    seed = torch.randn(outs[0].shape, dtype=torch.float64)
    torch.testing.assert_close(*outs, atol=1e-12, rtol=0)
    for ours, truth in zip(*(torch.autograd.grad(out, leaves, seed) for out in outs), strict=True):
        torch.testing.assert_close(ours, truth, atol=1e-12, rtol=0)


@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
def test_a_mask_and_a_window_hold_together(has_sinks):
    q, k, values, sinks = inputs(9, 9)
    documents = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    mask = (documents[:, None] == documents).tril().expand(B, 1, 9, 9)
    how = {"window": 3, "sinks_H": sinks if has_sinks else None}
    packed = attend(q, k, values, mask, **how)
    for part in (slice(0, 4), slice(4, 9)):
        alone = attend(q[:, :, part], k[:, :, part], values[:, :, part], None, **how)
        torch.testing.assert_close(packed[:, :, part], alone, atol=1e-12, rtol=0)


@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
def test_a_reach_leaves_each_query_its_own_number_of_keys(has_sinks):
    q, k, values, sinks = inputs(4, 9)
    sinks_H = sinks if has_sinks else None
    reach = torch.tensor([[1, 2, 3, 4], [9, 1, 40, 2]])
    found = attend(q, k, values, None, reach_BS=reach, sinks_H=sinks_H)
    for b in range(B):
        for s in range(4):
            seen = slice(max(0, 6 + s - int(reach[b, s])), 6 + s)
            alone = attend(
                q[b : b + 1, :, s : s + 1], k[b : b + 1, :, seen], values[b : b + 1, :, seen], None, sinks_H=sinks_H
            )
            torch.testing.assert_close(found[b : b + 1, :, s : s + 1], alone, atol=1e-12, rtol=0)
