"""A rank that waits in vain says where it is and in which collective, on every engine."""

import re
import time

import pytest
import torch
import torch.distributed as dist

from moe_zoo.certify.problem import own_rows
from moe_zoo.comm.mesh import Mesh
from moe_zoo.engines import make_engine
from moe_zoo.parallel.build import build_model
from moe_zoo.parallel.position import Position
from moe_zoo.spec.layout import resolve_layout
from moe_zoo.testing import run_distributed
from moe_zoo.train.watch import StallWatch, waits_for_a_peer
from tests.law import SEED, make_recipe

TIMEOUT_S = 2


def line_of_a_rank_that_waits(parallel: dict) -> str | None:
    """Rank 1 sleeps in layer 1; what rank 0 says of it."""
    recipe = make_recipe(parallel=parallel, model__vocab_size=30)
    mesh = Mesh(resolve_layout(recipe, 2, 2), torch.device("cpu"), timeout_s=TIMEOUT_S)
    engine = make_engine(build_model(recipe, mesh, SEED), mesh, recipe)
    layer = engine.module.stages["0"].layers["1"].attention
    if dist.get_rank() == 1:
        sleep = lambda *_: time.sleep(2 * TIMEOUT_S)  # noqa: E731
        layer.register_forward_pre_hook(sleep)
    try:
        engine.backward(own_rows(recipe, mesh, step=0))
    except RuntimeError as error:
        return waits_for_a_peer(error, dist.get_rank(), f"step 1, {engine.position.place}")


@pytest.mark.parametrize(
    ("parallel", "collective"),
    [
        ({"engine": "fsdp", "ep": 2, "gather": "step"}, "all_to_all_single"),
        ({"engine": "deepspeed", "zero_stage": 1, "tp": 2}, r"reduce_scatter_\w+|all_gather_\w+"),
        ({"engine": "deepspeed", "zero_stage": 1, "cp": 2, "ep": 1}, r"all_gather_\w+"),
    ],
)
def test_the_line_names_rank_step_layer_and_collective(parallel, collective):
    told = run_distributed(line_of_a_rank_that_waits, parallel)[0]
    assert re.match(
        rf"train: rank 0 waits in step 1, the (forward|backward) of layer 1, ({collective}), for another rank, which did "
        rf"not answer in time; ",
        told or "",
    ), told


def test_a_thread_speaks_once_of_a_rank_that_does_not_move():
    position, told = Position(), []
    position.move("the forward of layer 3")
    watch = StallWatch(position, 0.2, told.append)
    time.sleep(0.6)
    watch.close()
    assert len(told) == 1 and told[0].startswith("has not moved for 0 s in the forward of layer 3, ")
