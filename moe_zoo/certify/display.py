"""What a person sees of a certificate: progress while it is made, a table in the end."""

import math
import time

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moe_zoo.certify.certificate import Certificate, Result, tolerances, why
from moe_zoo.certify.measure import Deviation
from moe_zoo.train.console import clock

COLUMNS = {  # of the table: the quantities whose worst stands there
    "loss": ("loss",),
    "routing": ("order", "counts", "dropped", "entropy", "balance", "z", "bias"),
    "gradient": ("gradient",),
    "norm": ("norm",),
    "weight": ("weight", "restored"),
    "moments": ("exp_avg", "exp_avg_sq"),
}
HEADER = ("layout", *COLUMNS, "")
SHORT = {"not applicable": "-"}


class Display:
    """Cases as they end, on stderr; the time left is that of the cases so far."""

    def __init__(self, ranks: int):
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.began: float | None = None  # when the first case ended: until then the ranks start
        columns = (BarColumn(bar_width=20), TimeElapsedColumn())
        is_plain = not self.console.is_terminal
        self.progress = Progress(*columns, TextColumn("{task.description}"), console=self.console, disable=is_plain)
        self.task = self.progress.add_task(f"truth in float64, then {ranks} ranks", total=None)
        self.progress.start()

    def report(self, done: int, total: int, result: Result) -> None:
        """After each case."""
        left = f"{done}/{total}{self._left(done, total)}"
        self.progress.update(self.task, completed=done, total=total, description=left)
        text = f"{result.name}: {said(result)}  {result.duration_s:.1f} s"
        self.progress.console.print(f"{text}  {left}", markup=False)

    def _left(self, done: int, total: int) -> str:
        if self.began is None:
            self.began = time.monotonic()
            return "" if done < total else "  left 0:00"
        return f"  left {clock((time.monotonic() - self.began) / (done - 1) * (total - done))}"

    def close(self) -> None:
        """Leave the terminal as it was."""
        self.progress.stop()


def print_certificate(certificate: Certificate, console: Console) -> None:
    """The table, what the twin is, what is wrong or missing, and the verdict."""
    table = Table(
        title=f"{certificate.recipe.name}: every layout against one process", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in HEADER:
        table.add_column(column, justify="left" if column == "layout" else "right", no_wrap=column != "layout")
    for row, result in zip(rows(certificate), [None, *certificate.results, None], strict=True):
        table.add_row(*row, style="bold red" if result and not result.is_good else None, end_section=result is None)
    console.print(table)
    for text in (*remarks(certificate), f"twin: {shrunk(certificate)}"):
        console.print(text, markup=False, soft_wrap=True)
    style = "bold red" if certificate.failures else "bold green"
    console.print(certificate.verdict, style=style, markup=False, soft_wrap=True)


def markdown_table(certificate: Certificate) -> str:
    """The same for a file."""
    lines = [HEADER, ["---"] * len(HEADER), *rows(certificate)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    told = "".join(f"- {remark}\n" for remark in remarks(certificate))
    return f"Largest relative error of each quantity.\n\n{table}\n\n{told}\nThe twin: {shrunk(certificate)}.\n"


def rows(certificate: Certificate) -> list[list[str]]:
    """Cells: the oracle's own rounding, every case, the tolerances."""
    limits = tolerances(certificate.rounding)
    rounding = ["one process, fp32", *_cells(certificate.rounding), ""]
    cases = [[r.name, *_cells(r.worst), SHORT.get(r.status, r.status)] for r in certificate.results]
    allowed = [_number(max(limits[quantity] for quantity in group)) for group in COLUMNS.values()]
    return [rounding, *cases, ["allowed", *allowed, ""]]


def remarks(certificate: Certificate) -> list[str]:
    """A line for each case that is not equal."""
    return [f"{r.name}: {said(r)}" for r in certificate.results if r.status != "equal"]


def said(result: Result) -> str:
    """The status, and why."""
    return result.status if result.status == "equal" else f"{result.status}: {why(result)}"


def shrunk(certificate: Certificate) -> str:
    """Every number of the recipe that the twin has another of."""
    return ", ".join(f"{key} {before} -> {after}" for key, (before, after) in certificate.shrunk.items())


def _cells(worst: dict[str, Deviation]) -> list[str]:
    groups = ([worst[quantity].error for quantity in group if quantity in worst] for group in COLUMNS.values())
    return [_number(max(errors)) if errors else "" for errors in groups]


def _number(error: float) -> str:
    return "0" if error == 0 else "nan" if math.isinf(error) else f"{error:.0e}"
