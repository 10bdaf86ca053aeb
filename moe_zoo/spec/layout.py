"""ParallelLayout: how many ways the ranks of a launch share the work. Derived, never written in a recipe."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from moe_zoo.spec.errors import PlanError
from moe_zoo.spec.recipe import Recipe, row_parts

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def stages_per_rank(schedule: str) -> int:
    """How many pieces of the model a pipeline rank holds."""
    return 1 if schedule in ("GPipe", "1F1B") else 2


@dataclass(frozen=True)
class ParallelLayout:
    """Degrees of parallelism: ``world = pp x dp x cp x tp`` for dense weights.

    The ``dp x cp x tp`` ranks of a stage are ``replicate`` pods, each with a whole copy of the stage's weights; inside
    a pod they refold as ``edp x ep x etp`` for experts.
    """

    world: int
    ep: int  # groups of ranks that hold different experts
    pp: int = 1  # ranks that hold different layers
    schedule: str = "1F1B"  # of the pipeline
    tp: int = 1  # ranks that share each dense matrix
    cp: int = 1  # ranks that share each row
    etp: int = 1  # ranks that share each expert
    replicate: int = 1  # pods
    kv_parts: int = 1  # parts of the key and value heads; below tp, some ranks hold the same ones
    dispatch: str = "exact"  # how tokens reach experts
    ep_nodes: int = 1  # of hierarchical dispatch: nodes over which one set of experts is spread

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline rank."""
        return self.world // self.pp

    @property
    def pod_size(self) -> int:
        """Ranks that hold one copy of a stage's weights between them."""
        return self.stage_size // self.replicate

    @property
    def dp(self) -> int:
        """Ways in which rows are dealt out."""
        return self.stage_size // (self.cp * self.tp)

    @property
    def edp(self) -> int:
        """Ranks of a stage that hold the same slice of the same experts."""
        return self.stage_size // (self.ep * self.etp)

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

    def __str__(self) -> str:
        pipeline = f"pp {self.pp} ({self.schedule}) x " if self.pp > 1 else ""
        pods = f" in {self.replicate} pods" if self.replicate > 1 else ""
        inner = "".join(f" x {name} {size}" for name, size in (("cp", self.cp), ("tp", self.tp)) if size > 1)
        sliced = f" x etp {self.etp}" if self.etp > 1 else ""
        return f"{pipeline}dp {self.dp}{pods}{inner}, edp {self.edp} x ep {self.ep}{sliced}"


def resolve_layout(recipe: Recipe, world: int, ranks_per_node: int) -> ParallelLayout:
    """The layout of ``recipe`` on ``world`` ranks. Raises ``PlanError`` where it does not fit."""
    if recipe.expect and recipe.expect.world != world:
        raise PlanError(
            f"expect.world: {recipe.expect.world}; the recipe was launched on {world} {_ranks(world)}; "
            f"launch {recipe.expect.world}, or set expect=null"
        )
    asked, model = recipe.parallel, recipe.model
    _check_pp(recipe, world)
    stage = world // asked.pp
    whose = "launched" if asked.pp == 1 else f"of each of the {asked.pp} pipeline ranks"
    _check_model_fits(recipe, stage, whose)
    pod = stage // asked.replicate
    ep = _auto_ep(recipe, pod, ranks_per_node) if asked.ep == "auto" else asked.ep
    _check_experts(recipe, ep, pod, whose)
    kv_parts = min(asked.tp, *(spec.num_kv_heads for spec in model.attentions.values()))
    dispatch = "exact" if asked.dispatch == "auto" else asked.dispatch
    layout = ParallelLayout(
        world=world,
        ep=ep,
        pp=asked.pp,
        schedule=asked.schedule,
        tp=asked.tp,
        cp=asked.cp,
        etp=asked.etp,
        replicate=asked.replicate,
        kv_parts=kv_parts,
        dispatch=dispatch,
        ep_nodes=_ep_nodes(recipe, ep * asked.etp, ranks_per_node) if dispatch == "hierarchical" else 1,
    )
    _check_rows(recipe, layout.dp)
    return layout


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


def _check_model_fits(recipe: Recipe, ranks: int, whose: str) -> None:
    """Whether tp, cp, etp and replicate divide what they cut and the ranks of a stage, together."""
    asked = recipe.parallel
    taken = {"tp": 1, "cp": asked.tp, "replicate": asked.tp * asked.cp, "etp": asked.replicate}  # experts refold a pod
    for factor, others in taken.items():
        size: int = getattr(asked, factor)
        left = ranks // others
        if problem := next(_problems(recipe, factor, size, left), None):
            fits = next(n for n in range(size, 0, -1) if not any(_problems(recipe, factor, n, left)))
            these = whose if left == ranks else f"left of the {ranks} {whose}"
            raise PlanError(f"parallel.{factor}: {size}; {problem.format(whose=these)}; try {fits}")


def _problems(recipe: Recipe, factor: str, size: int, ranks: int) -> Iterator[str]:
    """Why ``factor`` cannot be ``size`` where ``ranks`` are to be shared out."""
    for multiple, name, number in _cut_dimensions(recipe, factor, size):
        if number % (multiple * size):
            what = f"{multiple} * {size} = {multiple * size} must" if multiple > 1 else "must"
            yield f"{what} divide {name} = {number}"
    if ranks % size:
        yield f"must divide the {ranks} {_ranks(ranks)} {{whose}}"
    for key, spec in recipe.model.attentions.items():
        yield from _key_head_problems(recipe, factor, size, f"model.{key}.num_kv_heads", spec.num_kv_heads)
    heads = {spec.num_kv_heads for spec in recipe.model.attentions.values()}
    if factor == "tp" and len({min(kv, size) for kv in heads} - {size}) > 1:
        yield f"leaves ranks with the same key heads, in groups that differ from layer to layer ({sorted(heads)} heads)"


def _key_head_problems(recipe: Recipe, factor: str, size: int, name: str, kv: int) -> Iterator[str]:
    if factor == "tp" and kv % size and size % kv:
        yield f"must divide {name} = {kv} or be a multiple of it"
    own = max(kv // recipe.parallel.tp, 1)
    if factor == "cp" and recipe.parallel.context == "ulysses" and own % size and size % own:
        yield f"ulysses spreads {own} key heads, which it must divide or be a multiple of"


def _cut_dimensions(recipe: Recipe, factor: str, degree: int) -> Iterator[tuple[int, str, int]]:
    """(multiple, what is cut, its size): ``multiple`` times the ``degree`` of ``factor`` must divide the size."""
    model, asked, lengths = recipe.model, recipe.parallel, _lengths(recipe)
    if factor == "tp":
        yield from ((1, f"model.{key}.num_heads", spec.num_heads) for key, spec in model.attentions.items())
        yield 1, "model.vocab_size", model.vocab_size
        yield from ((1, name, length) for name, length in lengths)
        if model.num_dense or (model.encoder and model.encoder.extra_ffn):
            yield 1, "model.feed_forward.d_ff", model.feed_forward.d_ff
        if model.moe and model.moe.shared:
            yield 1, "model.moe.shared.d_ff", model.moe.shared.d_ff
        if model.has_output_biases:
            yield 1, "model.d_model", model.d_model
    if factor == "cp" and asked.context == "ulysses":
        yield from ((asked.tp, name, length) for name, length in lengths)
        yield from ((asked.tp, f"model.{key}.num_heads", spec.num_heads) for key, spec in model.attentions.items())
    elif factor == "cp" and degree > 1:  # ranks hold two chunks each, so that causal work is even
        yield from ((2 * asked.tp, name, length) for name, length in lengths)
    if factor == "etp" and model.moe:
        yield 1, "model.moe.experts.d_ff", model.moe.experts.d_ff
        if model.moe.experts.bias:
            yield 1, "model.d_model", model.d_model


def _lengths(recipe: Recipe) -> list[tuple[str, int]]:
    """What of a row is cut by itself."""
    names = ("data.seq_len",) if recipe.data.encoder_len is None else ("data.encoder_len", "data.seq_len - encoder_len")
    return list(zip(names, row_parts(recipe.data), strict=True))


def _auto_ep(recipe: Recipe, pod: int, ranks_per_node: int) -> int:
    """The most that divides the experts and, etp times, the ranks of a node and of a pod."""
    etp = recipe.parallel.etp
    return math.gcd(recipe.model.num_experts or 1, max(1, ranks_per_node // etp), max(1, pod // etp))


def _check_experts(recipe: Recipe, ep: int, pod: int, whose: str) -> None:
    model, etp = recipe.model, recipe.parallel.etp
    for name, size in (("ep", ep), ("etp", etp)):
        if size > 1 and not model.num_experts:
            raise PlanError(f"parallel.{name}: {size}; the model has no experts to spread; set parallel.{name} to 1")
    if not model.num_experts:
        return
    whose = whose if recipe.parallel.replicate == 1 else "of each pod"
    fits = _largest_divisor(math.gcd(pod, model.num_experts), at_most=ep)
    if pod % ep:
        raise PlanError(f"parallel.ep: {ep}; must divide the {pod} {_ranks(pod)} {whose}; try {fits}, or auto")
    if model.num_experts % ep:
        raise PlanError(f"parallel.ep: {ep}; must divide the model's {model.num_experts} experts; try {fits}, or auto")
    if pod % (ep * etp):
        raise PlanError(
            f"parallel.etp: {etp}; parallel.ep * parallel.etp = {ep * etp} must divide the {pod} {_ranks(pod)} {whose}; "
            f"try {_largest_divisor(pod // ep, at_most=etp)}"
        )


def _ep_nodes(recipe: Recipe, ranks: int, ranks_per_node: int) -> int:
    """Nodes that the ``ranks`` of ep x etp fill."""
    nodes, rest = divmod(ranks, ranks_per_node)
    if nodes < 2 or rest or ranks_per_node % recipe.parallel.etp or recipe.model.num_experts % nodes:
        raise PlanError(
            f"parallel.dispatch: hierarchical; wants parallel.ep * parallel.etp = {ranks} to fill two or more nodes of "
            f"{ranks_per_node} ranks, experts whole in a node and equally many in each; try exact, or set parallel.ep"
        )
    return nodes


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
