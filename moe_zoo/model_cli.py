"""The verbs about models: list, info, card, check, and surgery."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_zoo.spec.errors import MoeZooError, did_you_mean

if TYPE_CHECKING:
    from moe_zoo.models.decoder import SparseDecoder
    from moe_zoo.spec.architecture import Architecture

ROW = 1024  # tokens of a text that are read at once
PIPED_WIDTH = 160  # of tables that no terminal shows

app = typer.Typer()
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for a program to read.")]
Name = Annotated[str, typer.Argument(metavar="MODEL", help="A preset, a folder or a Hub id.")]
Trained = Annotated[str, typer.Argument(metavar="MODEL", help="A folder or a Hub id.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="A folder for the new model.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Experts per token afterwards.")]
TextFile = Annotated[Path | None, typer.Option(help="Text on which the use of each expert is counted.")]


@app.command("list", epilog="Example: moe-zoo list --json")
def list_presets(as_json: AsJson = False) -> None:
    """List the named sizes: parameters, experts, family and licence."""
    from moe_zoo.spec.presets import load_preset, preset, preset_names
    from moe_zoo.spec.profile import parameters_text, profile

    found = [(preset(name), profile(load_preset(name))) for name in preset_names()]
    if as_json:
        print(json.dumps([about._asdict() | of._asdict() for about, of in found]))
        return
    rows = [
        (
            about.name,
            parameters_text(of.total),
            parameters_text(of.active),
            f"{of.top_k} of {of.experts}" if of.experts else "dense",
            about.family,
            about.license_name or about.license or "no weights",
        )
        for about, of in found
    ]
    _table(("preset", "parameters", "active", "experts", "family", "licence"), rows)


@app.command(epilog="Example: moe-zoo info qwen3-30b-a3b")
def info(
    name: Name,
    model: Annotated[bool, typer.Option("--model", help="Print the model section of a recipe, as YAML.")] = False,
    as_json: AsJson = False,
) -> None:
    """Sizes, shape, FLOPs and memory of a model, before it is loaded."""
    from moe_zoo.spec.profile import WORLDS, bytes_text, parameters_text, profile, shape_rows
    from moe_zoo.spec.yaml_text import dump_yaml

    architecture = _architecture(name)
    of = profile(architecture)
    if as_json:
        print(json.dumps({"name": name} | of._asdict() | {"architecture": architecture.to_dict()}))
        return
    if model:
        print(dump_yaml({"model": architecture.to_dict()}), end="")
        return
    sizes = [
        ("parameters", parameters_text(of.total)),
        ("met by one token", parameters_text(of.active)),
        ("embedding and head", parameters_text(of.embedding)),
        ("forward FLOPs per token", f"{of.forward_flops:.3g}"),
        *((f"weights in {dtype}", bytes_text(size)) for dtype, size in of.load_bytes.items()),
    ]
    _table((name, ""), [*sizes, *shape_rows(architecture)])
    training = [
        (str(stage), *(bytes_text(sizes[world]) for world in WORLDS)) for stage, sizes in of.training_bytes.items()
    ]
    _table(("to train, ZeRO stage", *(f"{world} ranks" if world > 1 else "1 rank" for world in WORLDS)), training)


@app.command(epilog="Example: moe-zoo card mixtral-8x7b > README.md")
def card(
    name: Annotated[str | None, typer.Argument(metavar="PRESET", help="A preset; none with --all.")] = None,
    everything: Annotated[Path | None, typer.Option("--all", metavar="FOLDER", help="Write every card there.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the model card of a preset, with the Hub's metadata; its numbers are computed from the preset."""
    from moe_zoo.models.card import card as make
    from moe_zoo.models.card import write_all

    if everything is not None:
        try:
            write_all(everything, Path("recipes"))
        except OSError as error:
            raise MoeZooError(f"card: {everything}; {error.strerror}; give a folder that can be written") from None
        return
    if name is None:
        raise MoeZooError("card: no preset given; name one, or give --all FOLDER; moe-zoo list shows them")
    made = make(name, Path("recipes") if Path("recipes").is_dir() else None)
    print(json.dumps({"metadata": made.data.to_dict(), "text": made.text}) if as_json else made.content, end="")


@app.command(epilog="Example: moe-zoo check runs/switch-lm-tiny/model")
def check(
    model: Trained,
    text: Annotated[
        Path | None, typer.Option(help="A file of text, of which 2,048 tokens are read, in place of a built-in one.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Its folder or Hub id, where the model has none.")] = None,
    as_json: AsJson = False,
) -> None:
    """Load a model and look at its first loss: trained, untrained, or wrong. Exit code 1 unless it is trained."""
    from moe_zoo.models.check import first_loss

    found = first_loss(model, _read(text), tokenizer)
    line = f"{model}: {found.loss:.3f} nats per token on {found.tokens} tokens, guessing is {found.guessing:.3f}: {found.verdict}"
    _print(found._asdict() | {"verdict": found.verdict}, line, as_json)
    raise typer.Exit(0 if found.verdict == "trained" else 1)


@app.command(epilog="Example: moe-zoo upcycle Qwen3-0.6B Qwen3-8x0.6B --experts 8 --top-k 2")
def upcycle(
    dense: Trained,
    out: Out,
    experts: Annotated[int, typer.Option(min=1, help="Experts of each sparse layer.")],
    top_k: Annotated[int, typer.Option(min=1, help="Experts that a token visits.")],
    granularity: Annotated[int, typer.Option(min=1, help="Parts into which the feed-forward is cut first.")] = 1,
    every: Annotated[int, typer.Option(min=1, help="Every so many layers become sparse.")] = 1,
    first: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the router's weights.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Make a dense model sparse: every expert a copy of its feed-forward, or part of one. It computes what it did."""
    from moe_zoo.models.surgery import upcycle as operate

    _operate(
        dense,
        out,
        as_json,
        lambda model: operate(model, experts, top_k, granularity=granularity, every=every, first=first, seed=seed),
    )


@app.command("split-experts", epilog="Example: moe-zoo split-experts mixtral finer --parts 4")
def split_experts(
    model: Trained,
    out: Out,
    parts: Annotated[int, typer.Option(min=2, help="Narrower experts that each becomes.")],
    as_json: AsJson = False,
) -> None:
    """Cut each expert into narrower ones, and let tokens visit as many times more. It computes what it did."""
    from moe_zoo.models.surgery import split_experts as operate

    _operate(model, out, as_json, lambda whole: operate(whole, parts))


@app.command("grow-experts", epilog="Example: moe-zoo grow-experts mixtral wider --copies 2")
def grow_experts(
    model: Trained,
    out: Out,
    copies: Annotated[int, typer.Option(min=2, help="Of each expert.")],
    top_k: TopK = None,
    as_json: AsJson = False,
) -> None:
    """Copy each expert. With all copies visited it computes what it did; fewer, by --top-k, cost less and change it."""
    from moe_zoo.models.surgery import grow_experts as operate

    _operate(model, out, as_json, lambda whole: operate(whole, copies, top_k=top_k))


@app.command("prune-experts", epilog="Example: moe-zoo prune-experts mixtral slim --experts 6 --text corpus.txt")
def prune_experts(
    model: Trained,
    out: Out,
    experts: Annotated[int, typer.Option(min=1, help="Experts that each layer keeps.")],
    text: Annotated[Path, typer.Option(help="Text on which the use of each expert is counted.")],
    top_k: TopK = None,
    as_json: AsJson = False,
) -> None:
    """Keep the experts of each layer that a text uses most."""
    from moe_zoo.models.surgery import prune_experts as operate

    def prune(whole: "SparseDecoder") -> "SparseDecoder":
        used = _usage(whole, model, text)
        if experts > used.shape[1]:
            raise MoeZooError(f"--experts: {experts}; the model has {used.shape[1]} in a layer; keep fewer")
        return operate(whole, used.argsort(1, descending=True)[:, :experts].tolist(), top_k)

    _operate(model, out, as_json, prune)


@app.command("merge-experts", epilog="Example: moe-zoo merge-experts mixtral half --size 2 --text corpus.txt")
def merge_experts(
    model: Trained,
    out: Out,
    size: Annotated[int, typer.Option(min=2, help="Experts that become one.")],
    text: TextFile = None,
    top_k: TopK = None,
    as_json: AsJson = False,
) -> None:
    """Merge alike experts into their mean, weighted by how much a text uses them (without one: evenly)."""
    import torch

    from moe_zoo.models.surgery import merge_experts as operate

    def merge(whole: "SparseDecoder") -> "SparseDecoder":
        arch = whole.architecture
        used = _usage(whole, model, text) if text else torch.ones(len(arch.sparse_layers), max(1, arch.num_experts))
        return operate(whole, size, used, top_k)

    _operate(model, out, as_json, merge)


def _operate(name: str, out: Path, as_json: bool, operate: Any) -> None:
    from moe_zoo.models.hub import load
    from moe_zoo.models.surgery import largest_change
    from moe_zoo.models.upstream import with_decoder
    from moe_zoo.spec.profile import parameters_text, profile

    _new_folder(out)
    before = load(name, dtype="auto")
    made = operate(before.model)
    change = largest_change(before.model, made)
    after = with_decoder(before, made)
    after.save_pretrained(out)
    kind = after.config.upstream["model_type"] if after.config.upstream else "moe_zoo, with its code"
    was, now = profile(before.model.architecture), profile(made.architecture)
    told = {"model": str(out), "format": kind, "largest_change": change, "parameters": now.total, "active": now.active}
    line = (
        f"{out} ({kind}): {parameters_text(was.total)} -> {parameters_text(now.total)} parameters, "
        f"{parameters_text(was.active)} -> {parameters_text(now.active)} active, {now.top_k} of {now.experts} experts; "
        f"logits of random tokens changed by {change:.1e} of the largest"
    )
    _print(told, line, as_json)


def _new_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        is_empty = not any(out.iterdir())
    except OSError as error:
        raise MoeZooError(f"{out}: {error.strerror}; a folder is made there; choose another place") from None
    if not is_empty:
        raise MoeZooError(f"{out}: not empty; nothing is written over; choose a folder that is new")


def _usage(model: "SparseDecoder", name: str, text: Path) -> Any:
    """Tokens that chose each expert, of a text read row by row: attention to all of it would not fit."""
    import torch

    from moe_zoo.models.surgery import measure_usage
    from moe_zoo.models.tokenizer import check_ids, read_tokenizer

    ids = check_ids(list(read_tokenizer(name)(_read(text))["input_ids"]), model.architecture.vocab_size, name)
    if not ids:
        raise MoeZooError(f"--text: {text}; it holds no token; give a longer one")
    return sum(measure_usage(model, row[None]) for row in torch.tensor(ids).split(ROW))


def _architecture(name: str) -> "Architecture":
    from moe_zoo.spec.presets import is_preset, load_preset, preset_names

    if is_preset(name):
        return load_preset(name)
    if "/" not in name and not Path(name).exists():
        raise MoeZooError(f"info: {name}; no preset and no folder; {did_you_mean(name, preset_names())}")
    from moe_zoo.models.source import Source

    return Source(name).architecture


def _read(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MoeZooError(
            f"{path}: {getattr(error, 'strerror', None) or 'no UTF-8 text'}; give a file of text"
        ) from None


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    table = Table(box=box.SIMPLE_HEAD)
    for index, title in enumerate(head):
        table.add_column(title, no_wrap=index < len(head) - 1)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _print(values: Any, text: str, as_json: bool) -> None:
    print(json.dumps(values) if as_json else text)
