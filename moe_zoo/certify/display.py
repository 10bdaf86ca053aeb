"""What a person sees of a certificate: progress while it is made, a table in the end."""

import math
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moe_zoo.certify.certificate import Certificate, Result, tolerances, why
from moe_zoo.certify.measure import Deviation
from moe_zoo.train.console import clock

COLUMNS = {  # of the table: the quantities whose worst stands there
    "loss": ("loss",),
    "routing": ("counts", "dropped", "entropy", "balance", "z", "bias"),
    "gradient": ("gradient",),
    "norm": ("norm",),
    "weight": ("weight", "restored"),
    "moments": ("exp_avg", "exp_avg_sq"),
}
HEADER = ("factor", "layout", *COLUMNS, "verdict")


class Display:
    """Cases as they end, on stderr; the time left is that of the cases so far."""

    def __init__(self, ranks: int):
        self.console, self.began = Console(stderr=True, highlight=False, soft_wrap=True), time.monotonic()
        columns = (BarColumn(bar_width=20), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
        is_plain = not self.console.is_terminal
        self.progress = Progress(*columns, TextColumn("{task.description}"), console=self.console, disable=is_plain)
        self.task = self.progress.add_task(f"truth in float64, then {ranks} ranks", total=None)
        self.progress.start()

    def report(self, done: int, total: int, result: Result) -> None:
        """After each case."""
        left = clock((time.monotonic() - self.began) / done * (total - done))
        self.progress.update(self.task, completed=done, total=total, description=f"left {left}")
        text = f"{result.factor}: {result.label}: {verdict(result)}  {result.duration_s:.1f} s"
        self.progress.console.print(f"{text}  left {left}", markup=False)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self.progress.stop()


def print_certificate(certificate: Certificate, console: Console) -> None:
    """The table, what the twin is, and the verdict."""
    table = Table(title=f"{certificate.recipe.name}: every layout against one process, largest relative error")
    for column in HEADER:
        table.add_column(column, justify="left" if column in ("factor", "layout", "verdict") else "right")
    for row, result in zip(rows(certificate), [None, *certificate.results, None], strict=True):
        table.add_row(*row, style="bold red" if result and not result.is_good else None, end_section=result is None)
    console.print(table)
    console.print("twin: " + ", ".join(_shrunk(certificate)), markup=False)
    console.print(certificate.verdict, style="bold red" if certificate.failures else "bold green", markup=False)


def markdown_table(certificate: Certificate) -> str:
    """The same table for a file, with what was shrunk."""
    lines = [HEADER, ["---"] * len(HEADER), *rows(certificate)]
    table = "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)
    return f"Largest relative error of each quantity.\n\n{table}\n\nThe twin: {', '.join(_shrunk(certificate))}."


def rows(certificate: Certificate) -> list[list[str]]:
    """Cells: the oracle's own rounding, every case, the tolerances."""
    limits = tolerances(certificate.rounding)
    rounding = ["", "one process, fp32 against float64", *_cells(certificate.rounding), ""]
    cases = [[r.factor, r.label, *_cells(r.worst), verdict(r)] for r in certificate.results]
    allowed = [f"{max(limits[quantity] for quantity in group):.0e}" for group in COLUMNS.values()]
    return [rounding, *cases, ["", "allowed", *allowed, ""]]


def verdict(result: Result) -> str:
    """The last cell: the status, and why where it is not ``equal``."""
    if result.status == "equal":
        return "equal"
    return f"{result.status}: {result.reason or why(result)}"


def _cells(worst: dict[str, Deviation]) -> list[str]:
    groups = ([worst[quantity].error for quantity in group if quantity in worst] for group in COLUMNS.values())
    return [_number(max(errors)) if errors else "" for errors in groups]


def _number(error: float) -> str:
    return "0" if error == 0 else "nan" if math.isinf(error) else f"{error:.0e}"


def _shrunk(certificate: Certificate) -> list[str]:
    return [f"{key} {before} -> {after}" for key, (before, after) in certificate.shrunk.items()]
