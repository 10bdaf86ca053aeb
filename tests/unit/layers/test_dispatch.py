"""Static capacity asks the host nothing: the layer runs, forward and backward, on tensors that hold no values."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_zoo.layers.dispatch import make_dispatcher
from moe_zoo.layers.experts import Experts
from moe_zoo.layers.moe import MoELayer
from moe_zoo.layers.router import TopKRouter
from moe_zoo.ops.experts import Unit

RANKS, EXPERTS = 4, 8


@pytest.fixture
def fake_group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield dist.group.WORLD
    dist.destroy_process_group()


def step(kind: str, group: dist.ProcessGroup | None, slices: int = 1, **router) -> torch.Size:
    """Forward and backward of a sparse layer; the shape of what one expert's gradient adds up to."""
    with FakeTensorMode():
        own = EXPERTS * slices // RANKS if group else EXPERTS
        layer = MoELayer(
            TopKRouter(6, EXPERTS, 2, jitter=0.1, **router), Experts(own, 6, 4, Unit("silu", True), bias=True)
        )
        layer.dispatcher = make_dispatcher(kind, EXPERTS, group=group, slices=slices)
        hidden = torch.empty(3, 7, 6, requires_grad=True)
        out, _ = layer(hidden, torch.arange(3))
        out.sum().backward()
        assert hidden.grad.shape == out.shape
        return layer.experts.w_up.grad.shape


@pytest.mark.parametrize("router", [{"capacity_factor": 1.25}, {"choice": "expert"}], ids=["token", "expert"])
@pytest.mark.parametrize(("spread", "slices", "own"), [(False, 1, 8), (True, 1, 2), (True, 2, 4)])
def test_static_capacity_reads_no_value_on_the_host(fake_group, spread, slices, own, router):
    assert step("padded", fake_group if spread else None, slices, **router) == (own, 6, 8)


@pytest.mark.parametrize("spread", [False, True])
def test_the_exact_way_does_and_so_the_test_above_would_see_it(fake_group, spread):
    with pytest.raises(DataDependentOutputException):
        step("exact", fake_group if spread else None, capacity_factor=1.25)
