"""A certificate from beginning to end: twin, truth, every case on one crew of ranks."""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from moe_zoo.certify.certificate import Certificate, Result, judge
from moe_zoo.certify.crew import Crew, CrewError
from moe_zoo.certify.factors import Case, cases
from moe_zoo.certify.measure import Deviation
from moe_zoo.certify.order import same_rows, write_rows
from moe_zoo.certify.ranks import steps_across_a_checkpoint, steps_of_one_layout
from moe_zoo.certify.truth import Truth, find_truth, make_problem
from moe_zoo.certify.twin import tiny_twin, what_was_shrunk
from moe_zoo.spec.recipe import Recipe

Report = Callable[[int, int, Result], None]  # (cases done, cases in all, the last one)


def certify(
    recipe: Recipe,
    crew: Crew,
    factors: Sequence[str] | None = None,
    report: Report = lambda done, total, result: None,
) -> Certificate:
    """Hold every layout of ``recipe``'s twin, or those of some ``factors``, against one process."""
    began, twin = time.monotonic(), tiny_twin(recipe, crew.ranks)
    found = cases(recipe, twin, crew.ranks, factors)
    truth = find_truth(twin, {case.recipe.train.micro_batches for case in found if case.recipe} or {1})
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in found:
            results.append(_result(case, crew, truth, Path(folder)))
            report(len(results), len(found), results[-1])
    shrunk = what_was_shrunk(recipe, twin)
    return Certificate(recipe, crew.ranks, shrunk, truth.rounding, results, time.monotonic() - began)


def _result(case: Case, crew: Crew, truth: Truth, folder: Path) -> Result:
    """What becomes of one case. A rank that crashes or hangs is its failure alone."""
    if case.recipe is None:
        return Result(case.factor, case.label, "not applicable", {}, reason=case.reason)
    began = time.monotonic()
    try:
        found = _measure(case, crew, truth, folder)
    except CrewError as error:
        seconds = time.monotonic() - began
        return Result(case.factor, case.label, "failed", {}, reason=str(error), duration_s=seconds)
    return judge(case.factor, case.label, found, truth.rounding, time.monotonic() - began)


def _measure(case: Case, crew: Crew, truth: Truth, folder: Path) -> list[Deviation]:
    problem, records = make_problem(case.recipe, truth.seed), truth.records[case.recipe.train.micro_batches]
    if case.factor == "order":
        write_rows(folder / "rows", case.recipe.data.seq_len)
        return crew.measure(same_rows, problem.recipe, folder / "rows")
    if case.elsewhere is not None:
        after = make_problem(case.elsewhere, truth.seed)
        return crew.measure(steps_across_a_checkpoint, problem, after, folder / "saved", records)
    return crew.measure(steps_of_one_layout, problem, records)
