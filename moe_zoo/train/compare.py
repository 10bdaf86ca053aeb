"""Several recipes, several seeds each, one table and one plot: what a claim of the kind "sparse beats dense" needs."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from moe_zoo.comm.processes import start_processes
from moe_zoo.spec.accounting import num_active_parameters, num_parameters, training_flops_per_token
from moe_zoo.spec.errors import MoeZooError
from moe_zoo.spec.recipe import Recipe
from moe_zoo.spec.recipe_file import load_recipe
from moe_zoo.train.plots import mean_curve, plot_losses, read_curve


class Contender(NamedTuple):
    """One recipe and the metrics files of its seeds."""

    recipe: Recipe
    files: list[Path]

    def final(self, name: str) -> list[float]:
        """The last logged value of a metric, one per seed."""
        return [read_curve(file, name).values[-1] for file in self.files]


def compare(paths: Sequence[Path], seeds: int, processes: int, overrides: Sequence[str], out: Path) -> list[Contender]:
    """Train each recipe with seeds 0, 1, ... (what is trained already is not trained again) and plot to ``out``."""
    recipes = [load_recipe(path, overrides) for path in paths]
    check_same_tokens(recipes)
    contenders = []
    for path, recipe in zip(paths, recipes, strict=True):
        files = [_train(path, recipe, seed, processes, overrides) for seed in range(seeds)]
        contenders.append(Contender(recipe, files))
    curves = {c.recipe.name: [read_curve(file, "train/loss") for file in c.files] for c in contenders}
    dots = {
        f"{c.recipe.name}, held out": mean_curve([read_curve(file, "valid/loss") for file in c.files])
        for c in contenders
    }
    plot_losses(out, curves, {}, title=f"equal tokens, {seeds} seeds", dots=dots, skip=0.2)
    out.with_suffix(".json").write_text(json.dumps([summary(contender) for contender in contenders], indent=1))
    return contenders


def check_same_tokens(recipes: Sequence[Recipe]) -> None:
    """Refuse to put losses side by side that were reached on different amounts of text."""
    first = recipes[0]
    for other in recipes[1:]:
        if num_tokens(other) != num_tokens(first) or other.data.path != first.data.path:
            raise MoeZooError(
                f"compare: {other.name} reads {num_tokens(other):,} tokens of {other.data.path}, {first.name} "
                f"{num_tokens(first):,} of {first.data.path}; losses are compared at equal tokens; let one extend the "
                f"other"
            )


def check_finished(metrics_file: Path, recipe: Recipe) -> None:
    """A run that Ctrl-C ended saved itself and ended well, but its loss is not that of the recipe."""
    steps = read_curve(metrics_file, "train/loss").steps if metrics_file.exists() else []
    if steps[-1:] != [recipe.train.steps]:
        raise MoeZooError(
            f"compare: {metrics_file.parent.name} stands at step {steps[-1] if steps else 0} of {recipe.train.steps}; "
            f"it was stopped; run the same command again to go on"
        )


def first_difference(ours: Any, theirs: Any, path: str = "") -> str | None:
    """The first key, in order, whose values differ; None if none does."""
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return None if ours == theirs else path
    keys = sorted(ours.keys() | theirs.keys())
    found = (first_difference(ours.get(key), theirs.get(key), f"{path}.{key}".lstrip(".")) for key in keys)
    return next(filter(None, found), None)


def num_tokens(recipe: Recipe) -> int:
    """Tokens that the whole run reads."""
    return recipe.train.steps * recipe.train.global_batch * recipe.data.seq_len


def summary(contender: Contender) -> dict[str, Any]:
    """The numbers of one line of the table."""
    recipe, losses = contender.recipe, contender.final("valid/loss")
    speeds = [statistics.median(read_curve(file, "train/tokens_per_s").values) for file in contender.files]
    return {
        "name": recipe.name,
        "parameters": num_parameters(recipe.model),
        "active_parameters": num_active_parameters(recipe.model),
        "training_flops_per_token": training_flops_per_token(
            recipe.model, recipe.data.seq_len, recipe.data.encoder_len or 0
        ),
        "tokens": num_tokens(recipe),
        "valid_loss_per_seed": losses,
        "valid_loss": statistics.mean(losses),
        "valid_loss_stdev": statistics.stdev(losses) if len(losses) > 1 else 0.0,
        "bits_per_byte": statistics.mean(contender.final("valid/bits_per_byte")),
        "tokens_per_s": statistics.median(speeds),
    }


def table(contenders: Sequence[Contender]) -> Table:
    """Validation loss at equal tokens, mean and standard deviation over seeds."""
    tokens = summary(contenders[0])["tokens"]
    made = Table(title=f"Held-out loss after {tokens / 1e6:.2f} M tokens each")
    for name in ("recipe", "parameters", "active", "MFLOP/token", "nats/token", "bits/byte"):
        made.add_column(name, justify="left" if name == "recipe" else "right", no_wrap=True)
    for row in map(summary, contenders):
        made.add_row(
            row["name"],
            f"{row['parameters'] / 1e6:.2f} M",
            f"{row['active_parameters'] / 1e6:.2f} M",
            f"{row['training_flops_per_token'] / 1e6:.2f}",
            f"{row['valid_loss']:.4f} ± {row['valid_loss_stdev']:.4f}",
            f"{row['bits_per_byte']:.4f}",
        )
    return made


def _train(path: Path, recipe: Recipe, seed: int, processes: int, overrides: Sequence[str]) -> Path:
    name = f"{recipe.name}-seed{seed}"
    asked = [*overrides, f"name={name}", f"train.seed={seed}"]
    folder = Path(recipe.log.folder) / name
    _check_kept(folder, load_recipe(path, asked))
    if code := start_processes(processes, ["-m", "moe_zoo", "train", str(path), *asked]):
        raise MoeZooError(f"compare: {name} ended with code {code}; its own line is above; run the same command again")
    check_finished(folder / "metrics.jsonl", recipe)
    return folder / "metrics.jsonl"


def _check_kept(folder: Path, recipe: Recipe) -> None:
    """A run that is kept counts only if it was asked for the same."""
    kept = folder / "recipe.yaml"
    if not kept.exists():
        return
    ours, theirs = (
        {section: values for section, values in r.to_dict().items() if section not in ("log", "checkpoint")}
        for r in (recipe, load_recipe(kept))
    )
    if key := first_difference(ours, theirs):
        raise MoeZooError(
            f"compare: {folder}; was trained with another {key}; a comparison takes what is trained already; delete "
            f"that folder, or set log.folder to another"
        )
