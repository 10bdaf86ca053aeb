"""``moe-zoo <verb>``. Every verb is a few lines that call the library."""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from data_pipelines.errors import DataError
from moe_zoo.comm.launch import check_world, destroy, leave, read_world
from moe_zoo.comm.processes import die_with_launcher, start_processes, tune_allocator
from moe_zoo.model_cli import app as model_app
from moe_zoo.spec.engine import engine_name
from moe_zoo.spec.errors import MoeZooError, PlanError
from moe_zoo.spec.layout import resolve_layout
from moe_zoo.spec.recipe_file import load_recipe, recipe_schema
from moe_zoo.spec.topology import ranks_per_domain

REPORT_AFTER_S = 3.0  # ranks other than 0 wait so long with an error that rank 0 probably tells too

app = typer.Typer(
    help="Train Mixture-of-Experts language models, from a laptop to a cluster.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(model_app)
RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file, for example of recipes/.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Put over the recipe.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for a program to read.")]
Processes = Annotated[int | None, typer.Option(min=1, help="Start so many ranks on this machine.")]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one verb. A user's mistake is one line on stderr and exit code 2."""
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    try:
        app(None if argv is None else list(argv), prog_name="moe-zoo")
    except SystemExit as end:  # how typer returns
        code = end.code
    except (MoeZooError, DataError) as error:
        _report(error)
        code = 2
    finally:
        was_rank = destroy()
    if was_rank:
        leave(code)
    sys.exit(code)


@app.command(epilog="Example: moe-zoo train recipes/tiny/switch_lm.yaml train.steps=50 --processes 2")
def train(recipe: RecipePath, overrides: Overrides = None, processes: Processes = None) -> None:
    """Train what a recipe describes; a run that was stopped goes on where it stood."""
    loaded = load_recipe(recipe, overrides or ())
    world = read_world()
    if processes and world.launcher != "none":
        raise PlanError(f"--processes: {processes}; {world.launcher} started the processes already; leave it out")
    if processes and processes > 1:
        # A recipe that does not fit starts no process.
        engine_name(loaded)
        resolve_layout(loaded, processes, ranks_per_domain(loaded, processes))
        raise typer.Exit(start_processes(processes, ["-m", "moe_zoo", "train", str(recipe), *(overrides or ())]))
    check_world(world, loaded.expect.world if loaded.expect else None)
    if world.launcher != "none":
        die_with_launcher()
    tune_allocator()
    from moe_zoo.train.trainer import train as run

    run(loaded, world)


@app.command(epilog="Example: moe-zoo prepare recipes/tiny/switch_lm.yaml")
def prepare(recipe: RecipePath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Tokenize the recipe's corpus into the shards that training reads; done once, resumed if interrupted."""
    from rich.console import Console

    from moe_zoo.train.preparation import prepare_data

    made = prepare_data(load_recipe(recipe, overrides or ()), Console(stderr=True))
    text = f"{made.url}: {made.train_tokens:,} training and {made.valid_tokens:,} held-out tokens"
    _print(made._asdict(), text, as_json)


@app.command(epilog="Example: moe-zoo tokenizer tokenizers/stdlib-1k/train.yaml")
def tokenizer(spec: Annotated[Path, typer.Argument(metavar="TRAIN_YAML", help="In the tokenizer's folder.")]) -> None:
    """Train a tokenizer from its specification, with checksums and an evaluation beside it."""
    from data_pipelines import train_tokenizer

    train_tokenizer(spec)
    print(spec.parent)


@app.command(epilog="Example: moe-zoo demo train.steps=800 name=longer")
def demo(overrides: Overrides = None) -> None:
    """Prepare data, train a tiny model, sample from it and check what it learnt. Minutes on two cores."""
    from moe_zoo.demo import run_demo

    run_demo(overrides or ())


@app.command(epilog="Example: moe-zoo compare recipes/tiny/switch_vs_dense.yaml recipes/tiny/dense_twin.yaml --seeds 3")
def compare(
    recipes: Annotated[list[Path], typer.Argument(metavar="RECIPE...", help="Two or more, on the same data.")],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each recipe.")] = 3,
    processes: Annotated[int, typer.Option(min=1, help="Ranks of each run, on this machine.")] = 2,
    override: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Put over each.")] = None,
    out: Annotated[Path, typer.Option(help="The plot; a .json of the numbers is written beside it.")] = Path(
        "runs/compare.png"
    ),
    as_json: AsJson = False,
) -> None:
    """Train recipes with several seeds each, and put their held-out losses side by side."""
    from rich.console import Console

    from moe_zoo.train.compare import compare as run
    from moe_zoo.train.compare import summary, table

    made = run(recipes, seeds, processes, override or (), out)
    if as_json:
        print(json.dumps([summary(contender) for contender in made]))
    else:
        Console().print(table(made), f"curves: {out}")


@app.command(epilog="Example: moe-zoo certify recipes/tiny/switch_lm.yaml parallel.zero_stage=2 --factors ep,resume")
def certify(
    recipe: RecipePath,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(min=2, help="Processes on this machine that share the twin.")] = 4,
    factors: Annotated[str | None, typer.Option(help="Some of them, by comma; all if left out.")] = None,
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option(help="Default: runs/NAME/certificate.")] = None,
) -> None:
    """Prove on a tiny twin of a recipe that every layout takes the steps of one process; name what does not."""
    loaded = load_recipe(recipe, overrides or ())
    from moe_zoo.certify.command import run

    certificate = run(loaded, ranks, factors, out or Path(loaded.log.folder) / loaded.name / "certificate", as_json)
    raise typer.Exit(1 if certificate.failures else 0)


@app.command(epilog="Example: moe-zoo generate runs/switch-lm-tiny 'def main(' --tokens 50")
def generate(
    model: Annotated[str, typer.Argument(help="A run folder, an exported folder or a Hub id.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="How many to add.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token each time.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt with a trained model."""
    from moe_zoo.models.generation import generate_text

    text = generate_text(model, prompt, num_tokens=tokens, temperature=temperature, seed=seed)
    _print({"prompt": prompt, "text": text}, prompt + text, as_json)


@app.command(epilog="Example: moe-zoo export runs/switch-lm-tiny exported/switch-lm-tiny")
def export(
    run: Annotated[Path, typer.Argument(help="A run folder, or one of its checkpoints.")],
    output: Annotated[Path, typer.Argument(help="A folder for config.json, weights and tokenizer.")],
    tokenizer: Annotated[Path | None, typer.Option(help="Its folder, where it is no longer the recipe's.")] = None,
    family: Annotated[
        str, typer.Option("--format", help="auto: a family of transformers if one fits; moe_zoo: ours, with its code.")
    ] = "auto",
) -> None:
    """Write a run's newest checkpoint as a folder that transformers loads; vLLM and SGLang too, where a family fits."""
    from moe_zoo.train.export import export_checkpoint

    print(export_checkpoint(run, output, tokenizer, family))


@app.command(epilog="Example: moe-zoo schema > docs/recipe.schema.json")
def schema() -> None:
    """Print the JSON schema of a recipe, for editors."""
    print(json.dumps(recipe_schema(), indent=2))


def _print(values: Any, text: str, as_json: bool) -> None:
    print(json.dumps(values) if as_json else text)


def _report(error: Exception) -> None:
    """One line per world: rank 0's at once; another rank's only if no launcher, told by rank 0, stops it first."""
    rank = int(os.environ.get("RANK") or 0)
    if rank:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(REPORT_AFTER_S + int(os.environ.get("LOCAL_RANK") or 0))
    print(f"rank {rank}: {error}" if rank else f"error: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
