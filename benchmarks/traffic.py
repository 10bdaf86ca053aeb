"""What a step sends, measured beside the closed form; and what each way of gathering and reducing costs a pipeline.

    OMP_NUM_THREADS=1 python -m benchmarks.traffic [--json out.json]

First table: MB that a rank sends per optimizer step, mean over ranks, by collective: what ``moe_zoo.comm.ledger`` saw on
2 and 4 gloo ranks, and what ``moe_zoo.planner.traffic`` says. Second: pp 2 x dp 2, ZeRO-3, 4 micro-batches, in units
of the rank's own parameters: how often they are gathered and their gradients reduced per step, and how much of them is
whole at one time, the most seen before any collective of the step. Bytes do not depend on the load of the machine.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.qwen3_moe import Shape, make_recipe
from moe_zoo.certify.problem import own_rows
from moe_zoo.comm.ledger import Ledger
from moe_zoo.comm.mesh import Mesh
from moe_zoo.engines import Engine, make_engine
from moe_zoo.parallel.build import build_model
from moe_zoo.planner.traffic import step_traffic
from moe_zoo.spec.layout import resolve_layout
from moe_zoo.spec.recipe import Recipe
from moe_zoo.testing import run_distributed

SHAPE = Shape(256, 64, 4, 4, 2, 16, 8, 32, 2, rows=8, seq_len=32)
PIPELINE_PASSES = 4
LAYOUTS: list[tuple[dict[str, Any], int]] = [  # (parallel, ranks)
    *(({"engine": "deepspeed", "zero_stage": stage, "ep": 2}, 2) for stage in range(4)),
    ({"engine": "deepspeed", "ep": 2, "gather": "step"}, 2),
    ({"engine": "deepspeed", "ep": 1}, 2),
    ({"engine": "fsdp", "ep": 2}, 2),
    ({"engine": "fsdp", "ep": 2, "zero_stage": 2}, 2),
    ({"engine": "deepspeed", "tp": 2, "ep": 2}, 2),
    ({"engine": "fsdp", "cp": 2, "ep": 2}, 2),
    ({"engine": "fsdp", "cp": 2, "ep": 2, "context": "ulysses"}, 2),
    ({"engine": "deepspeed", "ep": 2}, 4),
    ({"engine": "deepspeed", "ep": 4}, 4),
    ({"engine": "fsdp", "ep": 2, "replicate": 2}, 4),
    ({"engine": "deepspeed", "tp": 2, "ep": 4}, 4),
    ({"engine": "deepspeed", "pp": 2, "ep": 2, "gather": "step"}, 4),
    ({"engine": "fsdp", "pp": 2, "tp": 2, "ep": 2, "schedule": "DualPipeV"}, 4),
]
POLICIES: list[dict[str, str]] = [
    {"engine": engine, "schedule": schedule, "gather": gather, "reduce": reduce}
    for engine in ("deepspeed", "fsdp")
    for schedule in ("GPipe", "1F1B", "DualPipeV")
    for gather in ("layer", "step")
    for reduce in ("step", "micro_batch")
]


class Moved(NamedTuple):
    """Bytes sent by this rank in a step, by (ranks of the group, collective)."""

    measured: Counter[tuple[tuple[int, ...], str]]
    closed_form: Counter[tuple[tuple[int, ...], str]]


class Policy(NamedTuple):
    """Of one rank, in units of its parameters."""

    gathered: float
    reduced: float
    whole_weights: float
    whole_gradients: float


# ---------------------------------------------------------------------- on a rank


def moved(recipe: Recipe) -> Moved:
    """Of the second step of ``recipe`` (the first may also make buffers)."""
    engine = make(recipe)
    take_step(engine, 0)
    with Ledger() as ledger:
        take_step(engine, 1)
    mesh = engine.mesh
    groups = {"tp": mesh.tp_group, "cp": mesh.cp_group, "ep": mesh.ep_group, "pp": mesh.pp_group}
    groups |= {f"replicas {kind}": group for kind, group in mesh.replicas.items()} | {"pods": mesh.across_pods}
    ranks = {axis: tuple(dist.get_process_group_ranks(group)) for axis, group in groups.items()}
    closed_form: Counter = Counter()
    for (axis, kind), size in step_traffic(recipe, mesh.layout, recipe.parallel.engine, mesh.pp_rank).items():
        closed_form[ranks[axis], kind] += size
    return Moved(Counter(ledger.total_bytes()), closed_form)


def policy(recipe: Recipe) -> Policy:
    """Of the second step of ``recipe``, whose parameters all have the same replica group."""
    engine = make(recipe)
    take_step(engine, 0)
    with Watch(engine) as watch:
        take_step(engine, 1)
    replicas = tuple(dist.get_process_group_ranks(engine.mesh.pod_group))
    own = sum(placement.numel for placement in engine.placements.values())
    unit = 4 * own * (len(replicas) - 1) / len(replicas)  # bytes of one collective over all of them
    sent = watch.total_bytes()
    gathered, reduced = (sent.get((replicas, kind), 0.0) / unit for kind in ("all_gather", "reduce_scatter"))
    return Policy(gathered, reduced, *(most / own for most in watch.most))


class Watch(Ledger):
    """A ledger that also looks at the engine before each collective."""

    def __init__(self, engine: Engine):
        super().__init__()
        self.engine, self.most = engine, (0, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.most = tuple(map(max, self.most, whole_elements(self.engine)))
        return super().__torch_dispatch__(func, types, args, kwargs)


def whole_elements(engine: Engine) -> tuple[int, int]:
    """Elements of weights and of gradients that this rank holds whole now."""
    whole = [param for param in engine.module.parameters() if is_whole(param)]
    grads = [param.grad for param in engine.module.parameters() if isinstance(param.grad, torch.Tensor)]
    return sum(p.numel() for p in whole), sum(g.numel() for g in grads if not isinstance(g, DTensor))


def is_whole(param: torch.nn.Parameter) -> bool:
    """FSDP2 swaps sharded parameters for plain ones; ZeRO-3 says so on the parameter."""
    status = getattr(param, "ds_status", None)
    return not isinstance(param, DTensor) if status is None else status.name == "AVAILABLE"


def make(recipe: Recipe) -> Engine:
    world = dist.get_world_size()
    mesh = Mesh(resolve_layout(recipe, world, world), torch.device("cpu"))
    return make_engine(build_model(recipe, mesh, seed=0), mesh, recipe)


def take_step(engine: Engine, index: int) -> None:
    """One step over random documents."""
    engine.step(own_rows(engine.recipe, engine.mesh, index), lr=1e-3)


# ---------------------------------------------------------------------- tables


def traffic_rows(layouts: list[tuple[dict[str, Any], int]]) -> list[dict]:
    """One row per layout and collective."""
    rows = []
    for parallel, world in layouts:
        recipe = make_recipe(SHAPE, micro_batches=PIPELINE_PASSES if "pp" in parallel else 1, **parallel)
        pairs = run_distributed(moved, recipe, world_size=world)
        measured, closed_form = (by_kind(side, world) for side in zip(*pairs, strict=True))
        for kind in sorted(closed_form):
            figures = {"measured_bytes": measured[kind], "closed_form_bytes": closed_form[kind]}
            rows.append({"ranks": world, "layout": words(parallel), "collective": kind, **figures})
            print_traffic(rows[-1])
    return rows


def by_kind(ranks: list[Counter], world: int) -> Counter[str]:
    """Mean over ranks, all groups together."""
    total: Counter[str] = Counter()
    for counts in ranks:
        for (_, kind), size in counts.items():
            total[kind] += size / world
    return total


def policy_rows(policies: list[dict[str, str]]) -> list[dict]:
    """One row per policy; the larger of the ranks."""
    rows = []
    for parallel in policies:
        recipe = make_recipe(SHAPE, micro_batches=PIPELINE_PASSES, pp=2, ep=1, **parallel)
        ranks = run_distributed(policy, recipe, world_size=4)
        rows.append(parallel | Policy(*map(max, zip(*ranks, strict=True)))._asdict())
        print_policy(rows[-1])
    return rows


def words(parallel: dict[str, Any]) -> str:
    return " ".join(str(value) if key == "engine" else f"{key}={value}" for key, value in parallel.items())


def print_traffic(row: dict) -> None:
    ratio = row["measured_bytes"] / row["closed_form_bytes"]
    sizes = f"{row['measured_bytes'] / 1e6:12.4f}{row['closed_form_bytes'] / 1e6:12.4f}{ratio:9.3f}"
    print(f"{row['ranks']:5}  {row['layout']:46}{row['collective']:16}{sizes}", flush=True)


def print_policy(row: dict) -> None:
    names = "".join(
        f"{row[key]:{width}}" for key, width in (("engine", 11), ("schedule", 11), ("gather", 8), ("reduce", 13))
    )
    print(names + "".join(f"{row[key]:10.2f}" for key in Policy._fields), flush=True)


def main() -> None:
    """Print both tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one layout and one policy")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    count = 1 if args.quick else None
    print(f"{'ranks':>5}  {'layout':46}{'collective':16}{'measured MB':>12}{'closed form':>12}{'ratio':>9}")
    traffic = traffic_rows(LAYOUTS[3:4] if args.quick else LAYOUTS)
    titles = ("gathered", "reduced", "weights", "gradients")
    print(f"\n{'engine':11}{'schedule':11}{'gather':8}{'reduce':13}" + "".join(f"{title:>10}" for title in titles))
    policies = policy_rows(POLICIES[:count])
    if args.json:
        args.json.write_text(json.dumps({"traffic": traffic, "policies": policies}, indent=1))


if __name__ == "__main__":
    main()
