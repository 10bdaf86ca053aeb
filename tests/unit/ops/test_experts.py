"""Both fast paths and the batched one equal the reference, values and gradients."""

import pytest
import torch

from moe_zoo.ops import experts as fast
from moe_zoo.ops import reference
from moe_zoo.ops.experts import Stacks, Unit

T, D, F, E, K = 23, 8, 4, 4, 2  # widths of 16 bytes, as grouped_mm asks
UNITS = {
    **{
        f"{name} {'gated' if gated else 'plain'}": Unit(name, gated)
        for name in fast.ACTIVATIONS
        for gated in (True, False)
    },
    "gpt-oss": Unit("quick_gelu", True, limit=0.7, up_offset=1.0),
    "limit": Unit("silu", True, limit=1.1),
}


def inputs(unit: Unit, dtype=torch.float64, bias: bool = False):
    torch.manual_seed(0)
    x = torch.randn(T, D, dtype=dtype, requires_grad=True)
    chosen = torch.stack([torch.randperm(E - 1)[:K] for _ in range(T)])  # the last expert gets no token
    chosen[torch.rand(T, K) < 0.2] = E  # dropped
    weights = torch.rand(T, K, dtype=dtype, requires_grad=True)
    width = 2 * F if unit.gated else F
    shapes = [(E, D, width), (E, F, D), *([(E, width), (E, D)] if bias else [])]
    stacks = Stacks(*(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes))
    return x, chosen, weights, stacks


def looped(x, chosen, weights, stacks: Stacks, unit: Unit):
    return fast.LoopedExperts.apply(x, chosen, weights, unit, *stacks)


def batched(x, chosen, weights, stacks: Stacks, unit: Unit):
    """Every expert on every token; who did not choose it takes nothing."""
    y_ETD = fast.batched_ffn(x.expand(E, T, D), stacks, unit)
    gains_TE = torch.zeros(T, E + 1, dtype=x.dtype).scatter_add(1, chosen, weights)[:, :E]
    return torch.einsum("etd,te->td", y_ETD, gains_TE)


PATHS = {"looped": looped, "grouped": fast._grouped_experts, "batched": batched}


@pytest.mark.parametrize("bias", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
@pytest.mark.parametrize("path", PATHS)
def test_a_fast_path_equals_the_reference(path, unit, bias):
    dtype = torch.float32 if path == "grouped" else torch.float64  # grouped_mm knows no float64
    tolerance = 2e-5 if path == "grouped" else 1e-12
    leaves = inputs(unit, dtype, bias)
    outs = [run(*leaves, unit) for run in (PATHS[path], reference.experts)]
    seed = torch.randn(T, D, dtype=dtype)
    x, _, weights, stacks = leaves
    floats = [x, weights, *(stack for stack in stacks if stack is not None)]
    grads = [torch.autograd.grad(out, floats, seed) for out in outs]
    torch.testing.assert_close(outs[0], outs[1], atol=tolerance, rtol=0)
    for ours, truth in zip(*grads, strict=True):
        torch.testing.assert_close(ours, truth, atol=tolerance * 10, rtol=0)


def test_the_idle_expert_has_a_gradient_and_it_is_zero():
    x, chosen, weights, stacks = inputs(Unit("silu", True), bias=True)
    looped(x, chosen, weights, stacks, Unit("silu", True)).sum().backward()
    for stack in stacks:
        assert stack.grad[-1].eq(0).all() and stack.grad[0].ne(0).any()


def test_a_layer_where_every_slot_is_dropped_gives_zero():
    unit = Unit("relu", False)
    x, chosen, weights, stacks = inputs(unit, bias=True)
    out = fast.expert_ffn(x, torch.full_like(chosen, E), weights, stacks, unit)
    out.sum().backward()
    assert out.eq(0).all() and x.grad.eq(0).all() and stacks.w_up.grad.eq(0).all() and stacks.down_bias.grad.eq(0).all()
