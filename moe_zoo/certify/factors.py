"""The table of what a layout is made of: each factor alone, from the simplest to the recipe's own combination.

A factor is a list of cases, a case is what it changes of the twin on plain data parallelism. A new axis is one line.
"""

from collections.abc import Sequence
from typing import NamedTuple

from moe_zoo.certify.problem import layout_of
from moe_zoo.certify.twin import Changes, changed
from moe_zoo.spec.engine import engine_name
from moe_zoo.spec.errors import MoeZooError, RecipeError, did_you_mean
from moe_zoo.spec.recipe import Parallel, Recipe

AXES = ("pp", "replicate", "tp", "cp", "etp", "ep")
OWN = ("order", "resume", "combination")  # factors that take the recipe's own layout
PASSES = 4  # micro-batches where there are several: enough for four stages


class Case(NamedTuple):
    """One layout to be held against the oracle; without a recipe, why there is none."""

    factor: str
    label: str
    recipe: Recipe | None
    reason: str = ""
    elsewhere: Recipe | None = None  # where a resumed run goes on


def factors(twin: Recipe, ranks: int, own: Changes) -> dict[str, list[Changes]]:
    """The table; ``own`` is the recipe's combination."""
    several, other = {"train.micro_batches": PASSES}, {"parallel.engine": _other_engine(twin)}
    return {
        "order": [own],
        "zero": [{"parallel.zero_stage": stage} for stage in range(4)],
        "engine": [other | {"parallel.zero_stage": 3}],
        "accumulation": [several, several | {"parallel.reduce": "micro_batch"}],
        "recompute": [{"parallel.recompute": what} for what in (1, "selective")],
        "ep": [{"parallel.ep": degree} for degree in sorted({2, ranks})],
        "dispatch": [{"parallel.ep": ranks, "parallel.dispatch": kind} for kind in ("padded", "hierarchical")],
        "pp": [{"parallel.pp": 2} | several],
        "tp": [{"parallel.tp": degree} for degree in sorted({2, ranks})],
        "cp": [{"parallel.cp": 2, "parallel.context": method} for method in ("gather", "ulysses")],
        "etp": [{"parallel.etp": 2}],
        "replicate": [{"parallel.replicate": 2}],
        "resume": [own],
        "combination": [own],
    }


def cases(recipe: Recipe, twin: Recipe, ranks: int, names: Sequence[str] | None) -> list[Case]:
    """The cases of ``names`` (None: of all), in the table's order; what the recipe cannot have is told, not left out."""
    table = factors(twin, ranks, combination(recipe, ranks))
    for name in names or ():
        if name not in table:
            raise RecipeError(f"--factors: {name!r}; no such factor; {did_you_mean(name, table)}")
    found = [
        _case(name, changes, twin, ranks)
        for name, alone in table.items()
        if names is None or name in names
        for changes in alone
    ]
    left_out = _without_ranks(recipe, ranks)
    return [case._replace(label=f"{case.label}{left_out}") if case.factor in OWN else case for case in found]


def _other_engine(twin: Recipe) -> str:
    return "fsdp" if engine_name(twin) == "deepspeed" else "deepspeed"


def combination(recipe: Recipe, ranks: int) -> Changes:
    """The recipe's own layout: what it splits is split in two, while there are ranks."""
    asked = recipe.parallel
    settings = asked.model_dump(exclude={*AXES, "engine", "nvme"})  # a disk is the user's; it changes no number
    if isinstance(asked.recompute, int):
        settings["recompute"] = min(asked.recompute, 2)
    split: Changes = {f"parallel.{key}": value for key, value in settings.items()}
    rows = _halved(asked, ("pp", "replicate", "tp", "cp"), ranks)
    pod = ranks // rows.get("pp", 1) // rows.get("replicate", 1)
    experts = _halved(asked, ("etp",) if asked.ep == "auto" else ("etp", "ep"), pod)
    split |= {f"parallel.{axis}": 2 for axis in (*rows, *experts)}
    if asked.ep == "auto":
        split["parallel.ep"] = "auto"
    if asked.dispatch == "hierarchical":  # which wants to cross nodes
        split["parallel.ep"] = pod // experts.get("etp", 1)
    if recipe.train.micro_batches > 1 or asked.pp > 1:
        split["train.micro_batches"] = PASSES
    return split


def _halved(asked: Parallel, axes: Sequence[str], ranks: int) -> dict[str, int]:
    """Those of ``axes`` that are split, each in two, as long as the ranks can be halved."""
    found = {}
    for axis in axes:
        if getattr(asked, axis) > 1 and ranks % 2 == 0:
            found[axis], ranks = 2, ranks // 2
    return found


def _without_ranks(recipe: Recipe, ranks: int) -> str:
    """What of the recipe's own layout the ranks were too few for."""
    asked, split = recipe.parallel, combination(recipe, ranks)
    missing = [axis for axis in AXES if getattr(asked, axis) not in (1, "auto") and f"parallel.{axis}" not in split]
    return f", without {' and '.join(missing)} (too few ranks)" if missing else ""


def _case(name: str, changes: Changes, twin: Recipe, ranks: int) -> Case:
    label = _label(name, changes)
    try:
        recipe = changed(twin, changes)
        layout_of(recipe, ranks)
        engine_name(recipe)
    except MoeZooError as error:
        return Case(name, label, None, "; ".join(str(error).split("; ")[:2]))
    return Case(name, label, recipe, elsewhere=_elsewhere(twin, recipe) if name == "resume" else None)


def _elsewhere(twin: Recipe, own: Recipe) -> Recipe:
    """Plain data parallelism under the other engine, where there is one."""
    try:
        engine = engine_name(changed(twin, {"parallel.engine": _other_engine(twin), "parallel.zero_stage": 3}))
    except MoeZooError:
        engine = engine_name(twin)
    passes = own.train.micro_batches
    return changed(twin, {"parallel.engine": engine, "parallel.zero_stage": 3, "train.micro_batches": passes})


def _label(name: str, changes: Changes) -> str:
    shown = {key.rpartition(".")[2]: value for key, value in changes.items()}
    if name in OWN:
        shown = _not_plain(shown)
    names = {"zero_stage": "zero", "micro_batches": "passes"}
    text = ", ".join(f"{names.get(key, key)} {value}" for key, value in shown.items())
    return {"order": "every split over ranks", "resume": f"saved at {text}"}.get(name, text)


def _not_plain(shown: Changes) -> Changes:
    """What says more than a default would."""
    idle = {axis for axis, of in (("schedule", "pp"), ("context", "cp")) if of not in shown}
    plain = Parallel().model_dump(exclude={"zero_stage", *AXES})
    return {key: value for key, value in shown.items() if key not in idle and plain.get(key) != value}
