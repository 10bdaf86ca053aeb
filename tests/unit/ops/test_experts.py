"""Both fast paths equal the reference, values and gradients."""

import pytest
import torch

from moe_zoo.ops import experts as fast
from moe_zoo.ops import reference

T, D, F, E, K = 23, 8, 4, 4, 2  # widths of 16 bytes, as grouped_mm asks


def inputs(gated: bool, dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(T, D, dtype=dtype, requires_grad=True)
    chosen = torch.stack([torch.randperm(E - 1)[:K] for _ in range(T)])  # the last expert gets no token
    chosen[torch.rand(T, K) < 0.2] = E  # dropped
    weights = torch.rand(T, K, dtype=dtype, requires_grad=True)
    w_up = torch.randn(E, D, 2 * F if gated else F, dtype=dtype, requires_grad=True)
    w_down = torch.randn(E, F, D, dtype=dtype, requires_grad=True)
    return x, chosen, weights, w_up, w_down


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("path", ["looped", "grouped"])
def test_a_fast_path_equals_the_reference(path, activation, gated):
    dtype = torch.float64 if path == "looped" else torch.float32  # grouped_mm knows no float64
    tolerance = 1e-12 if path == "looped" else 1e-5
    leaves = inputs(gated, dtype)
    run = fast.LoopedExperts.apply if path == "looped" else fast._grouped_experts
    outs = [run(*leaves, activation, gated), reference.experts(*leaves, activation, gated)]
    seed = torch.randn(T, D, dtype=dtype)
    floats = [leaf for leaf in leaves if leaf.requires_grad]
    grads = [torch.autograd.grad(out, floats, seed) for out in outs]
    torch.testing.assert_close(outs[0], outs[1], atol=tolerance, rtol=0)
    for ours, truth in zip(*grads, strict=True):
        torch.testing.assert_close(ours, truth, atol=tolerance * 10, rtol=0)


def test_the_idle_expert_has_a_gradient_and_it_is_zero():
    leaves = inputs(gated=True)
    fast.LoopedExperts.apply(*leaves, "silu", True).sum().backward()
    assert leaves[3].grad[-1].eq(0).all() and leaves[3].grad[0].ne(0).any()


def test_a_layer_where_every_slot_is_dropped_gives_zero():
    x, chosen, weights, w_up, w_down = inputs(gated=False)
    out = fast.expert_ffn(x, torch.full_like(chosen, E), weights, w_up, w_down, activation="relu", gated=False)
    out.sum().backward()
    assert out.eq(0).all() and x.grad.eq(0).all() and w_up.grad.eq(0).all()
