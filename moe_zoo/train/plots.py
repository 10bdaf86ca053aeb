"""Curves of runs as a PNG: training loss, validation loss, and the lines they must cross."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

COLORS = ("#1b6ca8", "#d1495b", "#edae49", "#66a182")


class Curve(NamedTuple):
    """One metric of one run over steps."""

    steps: list[int]
    values: list[float]


def read_curve(metrics_file: Path, name: str) -> Curve:
    """The steps at which ``name`` was logged, and its values."""
    rows = [json.loads(line) for line in metrics_file.read_text().splitlines()]
    kept = [(row["step"], row[name]) for row in rows if name in row]
    return Curve([step for step, _ in kept], [value for _, value in kept])


def plot_losses(
    out: Path,
    curves: Mapping[str, list[Curve]],
    levels: Mapping[str, float],
    title: str,
    dots: Mapping[str, Curve],
    skip: float = 0.0,
) -> Path:
    """Draw groups of curves (one colour a group, its smoothed mean bold), horizontal ``levels`` and ``dots``.

    ``skip`` leaves out the first share of the steps, in which every model is alike.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    for color, (label, group) in zip(COLORS, curves.items(), strict=False):
        for curve in group:
            axes.plot(*_tail(curve, skip), color=color, alpha=0.15, linewidth=0.6)
        axes.plot(*_tail(smoothed(mean_curve(group)), skip), color=color, linewidth=1.8, label=label)
    own_colors = COLORS if len(curves) > 1 else COLORS[1:]
    for color, (label, curve) in zip(own_colors, dots.items(), strict=False):
        axes.plot(*curve, color=color, marker="o", markersize=4, label=label)
    for name, level in levels.items():
        axes.axhline(level, color="#777777", linestyle="--", linewidth=1)
        axes.annotate(
            f"{name} {level:.2f}", (0.995, level), xycoords=("axes fraction", "data"), ha="right", va="bottom"
        )
    axes.set(title=title, xlabel="optimizer step", ylabel="loss, nats per token")
    axes.grid(alpha=0.2)
    axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    return out


def _tail(curve: Curve, skip: float) -> Curve:
    first = int(skip * len(curve.steps))
    return Curve(curve.steps[first:], curve.values[first:])


def mean_curve(group: list[Curve]) -> Curve:
    """The mean over seeds, step by step."""
    return Curve(group[0].steps, [sum(values) / len(group) for values in zip(*(c.values for c in group), strict=True)])


def smoothed(curve: Curve, decay: float = 0.95) -> Curve:
    """Exponential average, exact from the first step on: the loss of one batch is noise."""
    out, weight, total = [], 0.0, 0.0
    for value in curve.values:
        total, weight = decay * total + value, decay * weight + 1
        out.append(total / weight)
    return Curve(curve.steps, out)
