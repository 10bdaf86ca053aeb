"""The certificate: what was compared, how far apart it was, and what that says. Plain data, JSON, Markdown."""

import json
import math
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import moe_zoo
from moe_zoo.certify.measure import PHASE_OF, Deviation
from moe_zoo.spec.recipe import Recipe
from moe_zoo.train.checkpoint.format import digest

EXACT, SCALAR, TENSOR = 1e-6, 1e-5, 1e-4  # relative: integers, losses, the worst element of a parameter
LEAST = dict.fromkeys(("order", "counts", "dropped", "bias"), EXACT) | dict.fromkeys(
    ("restored", "gradient", "weight", "exp_avg", "exp_avg_sq"), TENSOR
)
ROUNDING = 20  # a layout adds in another order: so many times the error of one process in fp32


@dataclass(frozen=True)
class Result:
    """What became of a case: ``equal``, ``differs``, ``failed`` or ``not applicable``."""

    factor: str
    label: str
    status: str
    worst: dict[str, Deviation]  # by quantity
    broken: Deviation | None = None  # where it began, and shows most
    reason: str = ""
    duration_s: float = 0.0

    @property
    def name(self) -> str:
        """``ep 2``, ``accumulation: passes 4``."""
        return self.label if self.label.startswith(self.factor) else f"{self.factor}: {self.label}"

    @property
    def is_good(self) -> bool:
        return self.status in ("equal", "not applicable")


@dataclass(frozen=True)
class Certificate:
    """All results for a recipe's twin."""

    recipe: Recipe
    ranks: int
    shrunk: dict[str, tuple[Any, Any]]
    rounding: dict[str, Deviation]  # of the oracle in fp32, against itself in float64
    results: list[Result]
    duration_s: float

    @property
    def failures(self) -> list[Result]:
        return [result for result in self.results if not result.is_good]

    @property
    def verdict(self) -> str:
        """One line."""
        if not self.failures:
            equal = sum(result.status == "equal" for result in self.results)
            if not equal:
                return f"nothing was measured: none of these factors applies to {self.recipe.name}"
            return f"one answer: {equal} layouts of {self.recipe.name} take the steps of one process"
        first, others = self.failures[0], len(self.failures) - 1
        more = f"; {others} more after it" if others else ""
        return f"broken: {first.name}; {why(first)}{more}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values; ``sha256`` is that of all the others."""
        body = {
            "recipe": self.recipe.name,
            "recipe_sha256": digest(self.recipe.to_dict()),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "host": {"cores": psutil.cpu_count(), "platform": platform.platform()},
            "ranks": self.ranks,
            "seconds": round(self.duration_s, 1),
            "twin": {key: list(values) for key, values in self.shrunk.items()},
            "tolerance": tolerances(self.rounding),
            "fp32_against_float64": {name: _told(found) for name, found in self.rounding.items()},
            "factors": [_plain(result) for result in self.results],
            "is_one_answer": not self.failures,
            "verdict": self.verdict,
        }
        return body | {"sha256": digest(body)}


def judge(factor: str, label: str, found: list[Deviation], rounding: dict[str, Deviation], seconds: float) -> Result:
    """Within tolerance or not, and where it first was not."""
    limits, largest = tolerances(rounding), {}
    for deviation in sorted(found, key=lambda d: d.error):
        largest[deviation.quantity] = deviation
    over = [d for d in found if not d.error <= limits[d.quantity]]
    if not over:
        return Result(factor, label, "equal", largest, duration_s=seconds)
    began = min((d.step, PHASE_OF[d.quantity]) for d in over)
    first = [d for d in over if (d.step, PHASE_OF[d.quantity]) == began]
    broken = max(first, key=lambda d: d.error / limits[d.quantity])
    return Result(factor, label, "differs", largest, broken, duration_s=seconds)


def tolerances(rounding: dict[str, Deviation]) -> dict[str, float]:
    """The largest relative error of each quantity that passes."""
    least = {quantity: LEAST.get(quantity, SCALAR) for quantity in PHASE_OF}
    return {
        quantity: max(limit, ROUNDING * rounding[quantity].error) if quantity in rounding else limit
        for quantity, limit in least.items()
    }


def why(result: Result) -> str:
    """What is wrong with a case, in words."""
    found = result.broken
    if found is None:
        return result.reason
    where = f" of {found.name}" if found.name else ""
    return f"{found.quantity}{where} is off by {found.error:.1e} at step {found.step}"


def versions() -> dict[str, str]:
    found = {"moe-zoo": moe_zoo.__version__, "python": platform.python_version()}
    for name in ("torch", "deepspeed"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def write(certificate: Certificate, folder: Path, table: str) -> dict[str, Any]:
    """``certificate.json``, which is returned, and ``certificate.md`` for people."""
    body = certificate.to_dict()
    (folder / "certificate.json").write_text(json.dumps(body, indent=1) + "\n")
    facts = {
        "recipe": f"{body['recipe']}, sha256 {body['recipe_sha256'][:16]}",
        "versions": ", ".join(f"{name} {number}" for name, number in body["versions"].items()),
        "date": body["date"],
        "host": f"{body['host']['cores']} cores, {certificate.ranks} ranks, {body['seconds']} s",
        "certificate": f"sha256 {body['sha256'][:16]}",
    }
    lines = [f"# Certificate of {body['recipe']}", "", f"**{body['verdict']}**", ""]
    lines += [f"- {name}: {fact}" for name, fact in facts.items()]
    (folder / "certificate.md").write_text("\n".join([*lines, "", table, ""]))
    return body


def _plain(result: Result) -> dict[str, Any]:
    return {
        "factor": result.factor,
        "case": result.label,
        "status": result.status,
        "reason": "" if result.is_good and not result.reason else why(result),
        "broken": _told(result.broken) if result.broken else None,
        "worst": {name: _told(found) for name, found in result.worst.items()},
        "seconds": round(result.duration_s, 1),
    }


def _told(found: Deviation) -> dict[str, Any]:
    """JSON knows no infinity: an error that is not a number is null."""
    return found._asdict() | {"error": found.error if math.isfinite(found.error) else None}
