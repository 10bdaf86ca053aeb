"""ParallelLayout: how many ways the ranks of a launch share the work. Derived, never written in a recipe."""

import math
from dataclasses import dataclass

from moe_zoo.spec.errors import PlanError
from moe_zoo.spec.recipe import Recipe

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def stages_per_rank(schedule: str) -> int:
    """How many pieces of the model a pipeline rank holds."""
    return 1 if schedule in ("GPipe", "1F1B") else 2


@dataclass(frozen=True)
class ParallelLayout:
    """Degrees of parallelism. Dense weights of a stage are shared by ``dp`` ranks, an expert by ``edp``."""

    world: int
    ep: int  # ranks that hold different experts
    pp: int = 1  # ranks that hold different layers
    schedule: str = "1F1B"  # of the pipeline
    dispatch: str = "exact"  # how tokens reach experts

    @property
    def dp(self) -> int:
        """Ranks that read different rows: those of one pipeline rank."""
        return self.world // self.pp

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts."""
        return self.dp // self.ep

    @property
    def num_stages(self) -> int:
        """Pieces the model is cut into. An interleaved or V-shaped schedule gives each pipeline rank two."""
        return self.pp * stages_per_rank(self.schedule) if self.pp > 1 else 1

    def stages_of(self, pp_rank: int) -> list[int]:
        """The stages of a pipeline rank, in the order of the layers; a V comes back to where it began."""
        if self.num_stages == self.pp:
            return [pp_rank]
        second = 2 * self.pp - 1 - pp_rank if self.schedule in V_SHAPED else pp_rank + self.pp
        return [pp_rank, second]


def resolve_layout(recipe: Recipe, world: int, ranks_per_node: int) -> ParallelLayout:
    """The layout of ``recipe`` on ``world`` ranks. Raises ``PlanError`` where it does not fit."""
    if recipe.expect and recipe.expect.world != world:
        raise PlanError(
            f"expect.world: {recipe.expect.world}; the recipe was launched on {world} {_ranks(world)}; "
            f"launch {recipe.expect.world}, or set expect=null"
        )
    _check_pp(recipe, world)
    pp = recipe.parallel.pp
    dp = world // pp
    ep = _auto_ep(recipe, dp, ranks_per_node) if recipe.parallel.ep == "auto" else recipe.parallel.ep
    _check_ep(recipe, ep, dp)
    _check_rows(recipe, dp)
    dispatch = _dispatch(recipe)
    return ParallelLayout(world=world, ep=ep, pp=pp, schedule=recipe.parallel.schedule, dispatch=dispatch)


def _dispatch(recipe: Recipe) -> str:
    dispatch = recipe.parallel.dispatch
    if dispatch == "hierarchical":
        raise PlanError("parallel.dispatch: hierarchical; the mesh makes no groups of nodes yet; set it to auto")
    return "exact" if dispatch == "auto" else dispatch


def _check_pp(recipe: Recipe, world: int) -> None:
    pp, schedule, layers = recipe.parallel.pp, recipe.parallel.schedule, recipe.model.num_layers
    if world % pp:
        fits = _largest_divisor(world, at_most=pp)
        raise PlanError(f"parallel.pp: {pp}; must divide the {world} {_ranks(world)} launched; try {fits}")
    if pp == 1:
        return
    stages = pp * stages_per_rank(schedule)
    if stages > layers:
        raise PlanError(
            f"parallel.pp: {pp}; schedule {schedule} cuts the model in {stages} stages, it has {layers} layers; try "
            f"{layers // stages_per_rank(schedule) or 1}"
        )
    passes = recipe.train.micro_batches
    least = 1 if schedule == "GPipe" else stages
    if passes < least or (schedule != "GPipe" and passes % pp):
        raise PlanError(
            f"train.micro_batches: {passes}; schedule {schedule} of {pp} pipeline ranks wants a multiple of {pp}, at "
            f"least {least}; try {-(-max(passes, least) // pp) * pp}"
        )
    if recipe.model.tie_embeddings:
        raise PlanError(
            "model.tie_embeddings: true; embedding and head of a pipeline live on different ranks; set it to false, or "
            "parallel.pp to 1"
        )


def _auto_ep(recipe: Recipe, dp: int, ranks_per_node: int) -> int:
    return math.gcd(recipe.model.num_experts or 1, ranks_per_node, dp)


def _check_ep(recipe: Recipe, ep: int, dp: int) -> None:
    num_experts = recipe.model.num_experts
    if ep > 1 and not num_experts:
        raise PlanError(f"parallel.ep: {ep}; the model has no experts to spread; set parallel.ep to 1")
    fits = _largest_divisor(math.gcd(dp, num_experts), at_most=ep) if num_experts else 1
    if dp % ep:
        whose = "launched" if recipe.parallel.pp == 1 else f"of each of the {recipe.parallel.pp} pipeline ranks"
        raise PlanError(f"parallel.ep: {ep}; must divide the {dp} {_ranks(dp)} {whose}; try {fits}, or auto")
    if num_experts and num_experts % ep:
        raise PlanError(f"parallel.ep: {ep}; must divide the model's {num_experts} experts; try {fits}, or auto")


def _check_rows(recipe: Recipe, dp: int) -> None:
    rows, passes = recipe.train.global_batch, recipe.train.micro_batches
    if rows % (passes * dp):
        fits = -(-rows // (passes * dp)) * passes * dp
        raise PlanError(
            f"train.global_batch: {rows}; must be a multiple of train.micro_batches * ranks = {passes} * {dp} = "
            f"{passes * dp}; try {fits}"
        )


def _largest_divisor(number: int, *, at_most: int) -> int:
    return next(divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0)


def _ranks(world: int) -> str:
    return "rank" if world == 1 else "ranks"
