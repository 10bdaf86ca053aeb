"""A world of one, in this process."""

import pytest
import torch.distributed as dist

from moe_zoo.comm.launch import World, destroy, init_process_group
from moe_zoo.comm.mesh import Mesh
from moe_zoo.spec.layout import ParallelLayout


@pytest.fixture
def alone(monkeypatch) -> Mesh:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert not dist.is_initialized()
    yield Mesh(ParallelLayout(world=1, ep=1), init_process_group(World()))
    destroy()
