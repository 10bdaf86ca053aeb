"""``make demo``: prepare a corpus every machine has, train a small Switch model on it, generate, and show the proof."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from data_pipelines import Baselines, load_tokenizer, ngram_baselines
from moe_zoo.spec.errors import MoeZooError
from moe_zoo.spec.recipe import Recipe
from moe_zoo.spec.recipe_file import load_recipe
from moe_zoo.train.preparation import prepare_data

ROOT = Path(__file__).resolve().parents[1]
RECIPE, LAUNCH = Path("recipes/tiny/switch_lm.yaml"), Path("recipes/launch/cpu_x2.yaml")
PROMPT = "def read_file(path):\n"


def run_demo(overrides: Sequence[str] = ()) -> None:
    """Everything, from the clone's root; what is done already is not done again."""
    if not (ROOT / RECIPE).is_file():
        raise MoeZooError(f"demo: {ROOT} has no {RECIPE}; the demo runs from a clone; git clone, then make demo")
    os.chdir(ROOT)
    began, console, recipe = time.monotonic(), Console(highlight=False, soft_wrap=True), load_recipe(RECIPE, overrides)
    run = Path(recipe.log.folder) / recipe.name
    _prepare(recipe, console)
    baselines = ngram_baselines(recipe.data.path, recipe.train.eval_rows)
    _train(overrides, console)
    metrics = _last_validation(run)
    plot = _plot(recipe, run, baselines)
    text = _generate(run)
    console.print(f"\n[bold]Text it writes[/bold] after {PROMPT!r}:")
    console.print(PROMPT + text, markup=False)
    console.print(_table(baselines, metrics, load_tokenizer(Path(recipe.data.tokenizer)).vocab_size))
    console.print(_places(recipe, run, plot), markup=False)
    console.print(f"demo: {time.monotonic() - began:.0f} s", markup=False)
    if metrics["valid/loss"] >= baselines.bigram.nats_per_token:
        raise MoeZooError(
            f"demo: validation loss {metrics['valid/loss']:.3f}; should be below the bigram's "
            f"{baselines.bigram.nats_per_token:.3f}; train longer: moe-zoo train {RECIPE} name=longer train.steps=1000"
        )


def _prepare(recipe: Recipe, console: Console) -> None:
    made = prepare_data(recipe, console)
    console.print(
        f"data: {made.num_documents:,} files of Python's standard library, {made.train_tokens:,} training and "
        f"{made.valid_tokens:,} held-out tokens ({made.bytes_per_token:.2f} bytes each) in {recipe.data.path}"
    )


def _train(overrides: Sequence[str], console: Console) -> None:
    """Two processes, as a user would start them."""
    if not find_spec("deepspeed"):
        console.print(f"DeepSpeed runs on Linux only; on {sys.platform} the FSDP2 engine shards the model instead")
    words = ["--config_file", str(LAUNCH), "recipes/", str(RECIPE), *overrides]
    console.print(f"$ accelerate launch {' '.join(words)}", markup=False)
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2))}  # accelerate would set 1
    command = [sys.executable, "-m", "accelerate.commands.launch", *words]
    with subprocess.Popen(command, env=threads | os.environ) as training:
        try:
            code = training.wait()
        except KeyboardInterrupt:  # the ranks got it too: let them save
            code = training.wait()
    if code:
        raise MoeZooError(f"demo: training ended with code {code}; its own line is above; run make demo again")


def _last_validation(run: Path) -> dict[str, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(row for row in reversed(rows) if "valid/loss" in row)


def _generate(run: Path) -> str:
    from moe_zoo.models.generation import generate_text

    return generate_text(run, PROMPT, num_tokens=80, temperature=0.7)


def _plot(recipe: Recipe, run: Path, baselines: Baselines) -> Path:
    from moe_zoo.train.plots import plot_losses, read_curve

    levels = {"unigram": baselines.unigram.nats_per_token, "bigram": baselines.bigram.nats_per_token}
    return plot_losses(
        run / "loss.png",
        {"training": [read_curve(run / "metrics.jsonl", "train/loss")]},
        levels,
        title=f"{recipe.name} on Python's standard library",
        dots={"validation": read_curve(run / "metrics.jsonl", "valid/loss")},
    )


def _table(baselines: Baselines, metrics: dict[str, float], vocab_size: int) -> Table:
    table = Table(title=f"Held-out files, the same {baselines.num_targets:,} tokens for each")
    for column in ("model", "nats per token", "bits per byte"):
        table.add_column(column, justify="left" if column == "model" else "right")
    rows = {
        f"uniform over {vocab_size:,} tokens": baselines.uniform,
        "unigram": baselines.unigram,
        "bigram, absolute discounting": baselines.bigram,
    }
    for name, score in rows.items():
        table.add_row(name, f"{score.nats_per_token:.3f}", f"{score.bits_per_byte:.3f}")
    table.add_row("this Switch model", f"{metrics['valid/loss']:.3f}", f"{metrics['valid/bits_per_byte']:.3f}")
    return table


def _places(recipe: Recipe, run: Path, plot: Path) -> str:
    lines = {
        "data": recipe.data.path,
        "tokenizer": recipe.data.tokenizer,
        "checkpoints": run / "checkpoints",
        "metrics": run / "metrics.jsonl",
        "curves": plot,
        "model": f"{run / 'model'}  (AutoModelForCausalLM.from_pretrained after import moe_zoo)",
        "more text": f"moe-zoo generate {run} 'class '",
    }
    return "\n".join(f"{name:>12}  {place}" for name, place in lines.items())
