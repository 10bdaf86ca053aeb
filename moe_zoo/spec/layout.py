"""ParallelLayout: how many ways the ranks of a launch share the work. Derived, never written in a recipe."""

import math
from dataclasses import dataclass

from moe_zoo.spec.errors import PlanError
from moe_zoo.spec.recipe import Recipe


@dataclass(frozen=True)
class ParallelLayout:
    """Degrees of parallelism. Dense weights are shared by ``dp`` ranks, an expert by ``edp``."""

    world: int
    ep: int  # ranks that hold different experts

    @property
    def dp(self) -> int:
        """Ranks that read different rows."""
        return self.world

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts."""
        return self.world // self.ep


def resolve_layout(recipe: Recipe, world: int, ranks_per_node: int) -> ParallelLayout:
    """The layout of ``recipe`` on ``world`` ranks. Raises ``PlanError`` where it does not fit."""
    if recipe.expect and recipe.expect.world != world:
        raise PlanError(
            f"expect.world: {recipe.expect.world}; the recipe was launched on {world} {_ranks(world)}; "
            f"launch {recipe.expect.world}, or set expect=null"
        )
    ep = _auto_ep(recipe, world, ranks_per_node) if recipe.parallel.ep == "auto" else recipe.parallel.ep
    _check_ep(recipe, ep, world)
    _check_rows(recipe, world)
    return ParallelLayout(world=world, ep=ep)


def _auto_ep(recipe: Recipe, world: int, ranks_per_node: int) -> int:
    return math.gcd(recipe.model.num_experts or 1, ranks_per_node, world)


def _check_ep(recipe: Recipe, ep: int, world: int) -> None:
    num_experts = recipe.model.num_experts
    if ep > 1 and not num_experts:
        raise PlanError(f"parallel.ep: {ep}; the model has no experts to spread; set parallel.ep to 1")
    fits = _largest_divisor(math.gcd(world, num_experts), at_most=ep) if num_experts else 1
    if world % ep:
        raise PlanError(f"parallel.ep: {ep}; must divide the {world} {_ranks(world)} launched; try {fits}, or auto")
    if num_experts and num_experts % ep:
        raise PlanError(f"parallel.ep: {ep}; must divide the model's {num_experts} experts; try {fits}, or auto")


def _check_rows(recipe: Recipe, world: int) -> None:
    rows, passes = recipe.train.global_batch, recipe.train.micro_batches
    if rows % (passes * world):
        fits = -(-rows // (passes * world)) * passes * world
        raise PlanError(
            f"train.global_batch: {rows}; must be a multiple of train.micro_batches * ranks = {passes} * {world} = "
            f"{passes * world}; try {fits}"
        )


def _largest_divisor(number: int, *, at_most: int) -> int:
    return next(divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0)


def _ranks(world: int) -> str:
    return "rank" if world == 1 else "ranks"
