"""What a rank does for a certificate: take the oracle's steps by an engine, and measure what it has where it has it."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from moe_zoo.certify.measure import Deviation, error_of, sizes, worst
from moe_zoo.certify.oracle import Record
from moe_zoo.certify.problem import Problem, layout_of, leave_experts_idle, own_rows
from moe_zoo.comm.mesh import Mesh
from moe_zoo.engines import Engine, StepStats, make_engine
from moe_zoo.parallel.build import build_model
from moe_zoo.spec.recipe import Recipe
from moe_zoo.train.checkpoint import Checkpoint, save_checkpoint
from moe_zoo.train.run_folder import RunFolder

MOMENTS = ("exp_avg", "exp_avg_sq")


def steps_of_one_layout(problem: Problem, truth: list[Record]) -> list[Deviation]:
    """Every step in the recipe's layout."""
    engine = make(problem)
    steps = (take_step(engine, step, record) for step, record in enumerate(truth))
    return worst(list(chain.from_iterable(steps)))


def steps_across_a_checkpoint(before: Problem, after: Problem, folder: Path, truth: list[Record]) -> list[Deviation]:
    """All steps but the last in one layout, a checkpoint, the last step in another."""
    engine, last = make(before), len(truth) - 1
    for step in range(last):
        engine.step(own_rows(before.recipe, engine.mesh, step), before.recipe.optim.lr)
    saved = save_checkpoint(folder, engine, last)
    engine = make(after)
    checkpoint = Checkpoint(saved)
    checkpoint.check_model(after.recipe.model)
    RunFolder(after.recipe).restore(checkpoint, engine)
    restored = [d._replace(quantity="restored", name=f"{d.quantity} {d.name}") for d in state(engine, last - 1, truth)]
    return worst([*restored, *take_step(engine, last, truth[last])])


def make(problem: Problem) -> Engine:
    """The engine of a recipe on all ranks."""
    recipe = problem.recipe
    mesh = Mesh(layout_of(recipe, dist.get_world_size()), torch.device("cpu"))
    placed = build_model(recipe, mesh, recipe.train.seed)
    leave_experts_idle(placed.module, problem.num_idle)
    return make_engine(placed, mesh, recipe)


def take_step(engine: Engine, step: int, truth: Record) -> list[Deviation]:
    """One optimizer step, compared with the oracle's."""
    recipe = engine.recipe
    scale, parts, stats = engine.backward(own_rows(recipe, engine.mesh, step))
    found = local(engine, step, "gradient", engine.gradient, truth)
    summary = engine._summary(scale, parts, stats, engine.update(recipe.optim.lr))
    return [*found, *seen_by_all(recipe, step, summary, truth), *state(engine, step, [truth] * (step + 1))]


def seen_by_all(recipe: Recipe, step: int, summary: StepStats, truth: Record) -> list[Deviation]:
    """Losses, norm and routing statistics, which every rank reports alike."""
    seen = {"loss": {"": summary.loss}, "norm": {"": summary.grad_norm}}
    if layers := recipe.model.sparse_layers:
        seen |= {"balance": {"": summary.balance}, "z": {"": summary.z}}
        by_layer = {"counts": summary.counts_LE, "entropy": summary.entropy_L, "dropped": summary.dropped_L}
        for quantity, values in by_layer.items():
            seen[quantity] = {f"layer {layer}": value for layer, value in zip(layers, values, strict=True)}
    return [
        Deviation(quantity, name, step + 1, error_of(torch.as_tensor(value), truth[quantity][name], size))
        for quantity, values in seen.items()
        for (name, value), size in zip(values.items(), sizes(truth[quantity]).values(), strict=True)
    ]


def state(engine: Engine, step: int, truth: list[Record]) -> list[Deviation]:
    """Weights, moments and router biases after a step."""
    record = truth[step]
    found = local(engine, step, "weight", engine.weight, record)
    whole_sizes = {key: sizes(record[key]) for key in MOMENTS}
    for shard in engine.shards():
        placement = engine.placements[shard.name]
        for key in MOMENTS:
            values, size = shard.tensors[key], whole_sizes[key][placement.name]
            expected = placement.take(record[key][placement.name]).flatten()[shard.start : shard.start + len(values)]
            found.append(Deviation(key, placement.name, step + 1, error_of(values, expected, size)))
    size = sizes(record["bias"])
    for name, buffer in engine.buffers().items():
        found.append(Deviation("bias", name, step + 1, error_of(buffer, record["bias"][name], size[name])))
    return found


def local(engine: Engine, step: int, quantity: str, read: Callable[[str], Tensor], truth: Record) -> list[Deviation]:
    """This rank's slices of something that every parameter has."""
    size, found = sizes(truth[quantity]), []
    for name, placement in engine.placements.items():
        expected = placement.take(truth[quantity][placement.name])
        error = error_of(read(name).view_as(expected), expected, size[placement.name])
        found.append(Deviation(quantity, placement.name, step + 1, error))
    return found
