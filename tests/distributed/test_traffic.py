"""What a step moves is what arithmetic says, per collective and axis."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from moe_zoo.certify.problem import own_rows
from moe_zoo.comm.ledger import Ledger
from moe_zoo.comm.mesh import Mesh
from moe_zoo.engines import make_engine
from moe_zoo.parallel.build import build_model
from moe_zoo.planner.traffic import step_traffic
from moe_zoo.spec.layout import resolve_layout
from moe_zoo.spec.recipe import Recipe
from moe_zoo.testing import run_distributed
from tests.distributed.test_layout_law import split_recipe
from tests.law import SEED

SMALL = 1000  # bytes: norms, losses, counts


def measured(recipe: Recipe) -> tuple[Counter, Counter]:
    """(bytes sent in the second step by the ranks that share a group and the collective, what arithmetic says)."""
    world = dist.get_world_size()
    mesh = Mesh(resolve_layout(recipe, world, world), torch.device("cpu"))
    engine = make_engine(build_model(recipe, mesh, SEED), mesh, recipe)
    for step in range(2):
        part = own_rows(recipe, mesh, step)
        with Ledger() as ledger:
            engine.step(part, 1e-3)
    groups = {"tp": mesh.tp_group, "cp": mesh.cp_group, "ep": mesh.ep_group, "pp": mesh.pp_group}
    groups |= {f"replicas {kind}": group for kind, group in mesh.replicas.items()} | {"pods": mesh.across_pods}
    ranks = {axis: tuple(dist.get_process_group_ranks(group)) for axis, group in groups.items()}
    expected: Counter = Counter()
    for (axis, kind), size in step_traffic(recipe, mesh.layout, recipe.parallel.engine, mesh.pp_rank).items():
        expected[ranks[axis], kind] += size
    return Counter(ledger.total_bytes()), expected


LAYOUTS = [
    ({"engine": "deepspeed"}, 2),
    ({"engine": "deepspeed", "zero_stage": 1}, 2),
    ({"engine": "deepspeed", "zero_stage": 2}, 2),
    ({"engine": "deepspeed", "zero_stage": 0}, 2),
    ({"engine": "deepspeed", "gather": "step", "ep": 1}, 2),
    ({"engine": "deepspeed", "reduce": "micro_batch", "ep": 1}, 2),
    ({"engine": "fsdp"}, 2),
    ({"engine": "fsdp", "zero_stage": 2, "ep": 1}, 2),
    ({"engine": "deepspeed", "tp": 2, "ep": 2}, 2),
    ({"engine": "fsdp", "tp": 2, "ep": 1, "recompute": 1}, 2),
    ({"engine": "deepspeed", "cp": 2, "ep": 1}, 2),
    ({"engine": "fsdp", "cp": 2, "ep": 2, "context": "ulysses"}, 2),
    ({"engine": "fsdp", "replicate": 2, "ep": 1}, 2),
    ({"engine": "deepspeed", "replicate": 2, "tp": 2, "ep": 2}, 4),
    ({"engine": "fsdp", "pp": 2, "tp": 2, "ep": 1, "schedule": "DualPipeV"}, 4),
    ({"engine": "deepspeed", "pp": 2, "gather": "step", "ep": 2}, 4),
]


@pytest.mark.parametrize(("parallel", "world"), LAYOUTS, ids=lambda value: str(value))
def test_bytes_by_collective(parallel, world):
    changes = {"model__num_layers": 4, "train__micro_batches": 4} if "pp" in parallel else {}
    recipe = split_recipe("fsdp", **{f"parallel__{key}": value for key, value in parallel.items()}, **changes)
    pairs = run_distributed(measured, recipe, world_size=world)
    found, expected = (sum(counts, Counter()) for counts in zip(*pairs, strict=True))
    for key in found | expected:
        tolerance = SMALL * world + 0.25 * expected[key] * (key[1] == "all_to_all")  # routing is not even
        assert abs(found[key] - expected[key]) <= tolerance, (key, found[key], expected[key])
