"""The truth of a twin: its steps in float64, at a seed where rounding decides nothing, and how far fp32 is from them."""

from typing import NamedTuple

import torch

from moe_zoo.certify.measure import Deviation, compare_whole
from moe_zoo.certify.oracle import Record, textbook_steps
from moe_zoo.certify.problem import Problem
from moe_zoo.certify.twin import changed
from moe_zoo.spec.errors import MoeZooError
from moe_zoo.spec.recipe import Recipe

MIN_GAP = 2e-5  # between scores, over their mean: closer ones would be chosen by rounding, not by a layout
MAX_SEEDS = 50


class Truth(NamedTuple):
    """What one process does."""

    seed: int
    records: dict[int, list[Record]]  # by micro-batches, which the scope of a balance loss may depend on
    rounding: dict[str, Deviation]  # the largest error in fp32, by quantity


def find_truth(twin: Recipe, passes: set[int]) -> Truth:
    """The first seed whose steps rounding cannot turn."""
    for seed in range(MAX_SEEDS):
        problems = {n: make_problem(changed(twin, {"train.micro_batches": n}), seed) for n in sorted(passes)}
        records = {count: textbook_steps(problem, torch.float64) for count, problem in problems.items()}
        if all(_is_steady(twin, steps) for steps in records.values()):
            return Truth(seed, records, _rounding(problems, records))
    raise MoeZooError(
        f"certify: {twin.name}; in {MAX_SEEDS} seeds rounding would have chosen an expert, so no layout can be held to its "
        f"steps; try fewer --ranks, or a smaller model.moe.router.top_k"
    )


def make_problem(recipe: Recipe, seed: int) -> Problem:
    """One idle expert: where experts can choose or be chosen by bias, more would share a fate."""
    return Problem(changed(recipe, {"train.seed": seed}), num_idle=1 if recipe.model.moe else 0)


def _is_steady(twin: Recipe, steps: list[Record]) -> bool:
    gaps = [float(gap) for record in steps for gap in record.get("gap", {}).values()]
    return min(gaps, default=1.0) > MIN_GAP and all(record["norm"][""] > twin.optim.clip for record in steps)


def _rounding(problems: dict[int, Problem], records: dict[int, list[Record]]) -> dict[str, Deviation]:
    found = [
        deviation
        for count, steps in records.items()
        for step, (single, double) in enumerate(zip(textbook_steps(problems[count]), steps, strict=True))
        for deviation in compare_whole(single, double, step + 1)
    ]
    return {deviation.quantity: deviation for deviation in sorted(found, key=lambda d: d.error)}
