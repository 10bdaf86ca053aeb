"""A certificate from beginning to end: twin, truth, every case on one pool of ranks."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from moe_zoo.certify.certificate import Certificate, Result, judge
from moe_zoo.certify.factors import Case, cases
from moe_zoo.certify.measure import Deviation, compare_whole
from moe_zoo.certify.oracle import Record, textbook_steps
from moe_zoo.certify.order import same_rows, write_rows
from moe_zoo.certify.problem import Problem
from moe_zoo.certify.ranks import steps_across_a_checkpoint, steps_of_one_layout
from moe_zoo.certify.twin import changed, tiny_twin, what_was_shrunk
from moe_zoo.spec.recipe import Recipe
from moe_zoo.testing import RankError, run_distributed

TIMEOUT_S = 120.0  # of a case
MIN_GAP = 1e-5  # between scores: closer ones would be chosen by rounding, and no layout could be held to that
MAX_SEEDS = 50
Around = Callable[[], AbstractContextManager]  # what the ranks do their work in
Report = Callable[[int, int, Result], None]  # (cases done, cases in all, the last one)


def certify(
    recipe: Recipe,
    ranks: int = 4,
    factors: Sequence[str] | None = None,
    report: Report = lambda done, total, result: None,
    log: Path = Path(os.devnull),
    around: Around = nullcontext,
    timeout_s: float = TIMEOUT_S,
) -> Certificate:
    """Hold every layout of ``recipe``'s twin against one process. What the ranks print goes to ``log``."""
    began, twin = time.monotonic(), tiny_twin(recipe, ranks)
    with tempfile.TemporaryDirectory() as folder:
        found = cases(recipe, twin, ranks, factors)
        bench = Bench(twin, found, ranks, Path(folder), log, around, timeout_s)
        results: list[Result] = []
        for case in found:
            results.append(bench.result(case))
            report(len(results), len(found), results[-1])
    shrunk = what_was_shrunk(recipe, twin)
    return Certificate(recipe, ranks, shrunk, bench.rounding, results, time.monotonic() - began)


class Bench:
    """The twin's truth, and ranks to hold against it."""

    def __init__(
        self, twin: Recipe, found: list[Case], ranks: int, folder: Path, log: Path, around: Around, timeout_s: float
    ):
        self.ranks, self.folder, self.log, self.around, self.timeout_s = ranks, folder, log, around, timeout_s
        passes = {case.recipe.train.micro_batches for case in found if case.recipe}
        self.twin, self.truths, self.rounding = find_truth(twin, passes or {1})

    def result(self, case: Case) -> Result:
        """Run one case; a rank that crashes or hangs is its failure alone."""
        if case.recipe is None:
            return Result(case.factor, case.label, "not applicable", {}, reason=case.reason)
        began = time.monotonic()
        try:
            found = self._measure(case)
        except RankError as error:
            self._keep(case, error.text)
            failure = f"rank {error.rank}: {error.text.strip().splitlines()[-1]}"
        except TimeoutError as error:
            failure = str(error)
        else:
            return judge(case.factor, case.label, found, self.rounding, time.monotonic() - began)
        return Result(case.factor, case.label, "failed", {}, reason=failure, duration_s=time.monotonic() - began)

    def _measure(self, case: Case) -> list[Deviation]:
        recipe, elsewhere = (self._seeded(r) for r in (case.recipe, case.elsewhere or case.recipe))
        truth, problem = self.truths[recipe.train.micro_batches], make_problem(recipe)
        if case.factor == "order":
            rows = self.folder / "rows"
            write_rows(rows, recipe.data.seq_len)
            return self._on_ranks(same_rows, recipe, recipe, rows)
        if case.factor == "resume":
            after = make_problem(elsewhere)
            return self._on_ranks(steps_across_a_checkpoint, problem, after, self.folder / "saved", truth)
        return self._on_ranks(steps_of_one_layout, problem, truth)

    def _keep(self, case: Case, text: str) -> None:
        with open(self.log, "a") as log:
            log.write(f"{case.factor}, {case.label}:\n{text}\n")

    def _seeded(self, recipe: Recipe) -> Recipe:
        return changed(recipe, {"train.seed": self.twin.train.seed})

    def _on_ranks(self, body: Callable[..., list[Deviation]], *args: Any) -> list[Deviation]:
        work = (self.log, self.around, body, args)
        by_rank = run_distributed(on_rank, *work, world_size=self.ranks, timeout_s=self.timeout_s)
        return list(chain.from_iterable(by_rank))


def on_rank(log: Path, around: Around, body: Callable[..., list[Deviation]], args: tuple) -> list[Deviation]:
    """On a rank: what DeepSpeed and torch have to say goes to the log."""
    with _printing_to(log), around():
        return body(*args)


def find_truth(twin: Recipe, passes: set[int]) -> tuple[Recipe, dict[int, list[Record]], dict[str, Deviation]]:
    """The first seed whose steps rounding cannot turn: (the twin with it, its float64 records, errors of fp32)."""
    for seed in range(MAX_SEEDS):
        recipe = changed(twin, {"train.seed": seed})
        problems = {count: make_problem(changed(recipe, {"train.micro_batches": count})) for count in sorted(passes)}
        truths = {count: textbook_steps(problem, torch.float64) for count, problem in problems.items()}
        if all(_is_steady(recipe, truth) for truth in truths.values()):
            return recipe, truths, _rounding(problems, truths)
    raise AssertionError(f"no steady twin of {twin.name} in {MAX_SEEDS} seeds")


def make_problem(recipe: Recipe) -> Problem:
    """One idle expert: two would tie."""
    return Problem(recipe, num_idle=1 if recipe.model.moe else 0)


def _is_steady(recipe: Recipe, truth: list[Record]) -> bool:
    gaps = [float(gap) for record in truth for gap in record.get("gap", {}).values()]
    return min(gaps, default=1.0) > MIN_GAP and all(record["norm"][""] > recipe.optim.clip for record in truth)


def _rounding(problems: dict[int, Problem], truths: dict[int, list[Record]]) -> dict[str, Deviation]:
    found = [
        deviation
        for count, truth in truths.items()
        for step, (single, double) in enumerate(zip(textbook_steps(problems[count]), truth, strict=True))
        for deviation in compare_whole(single, double, step + 1)
    ]
    return {deviation.quantity: deviation for deviation in sorted(found, key=lambda d: d.error)}


@contextmanager
def _printing_to(log: Path) -> Iterator[None]:
    """File descriptors 1 and 2 of this process, C libraries included."""
    kept, target = [os.dup(1), os.dup(2)], os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        for number in (1, 2):
            os.dup2(target, number)
        yield
    finally:
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(target)
