"""Model cards: for every preset a page with Hub metadata, all of its numbers computed from the preset."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from moe_zoo.spec.accounting import weight_bytes
from moe_zoo.spec.presets import Preset, load_preset, preset, preset_names
from moe_zoo.spec.profile import SEQ_LEN, WORLDS, bytes_text, parameters_text, profile, shape_rows
from moe_zoo.spec.yaml_text import parse_yaml

Row = tuple[str, ...]
LARGE = 2**36  # bytes of fresh weights that nobody should ask one process for


def card(name: str, recipes: Path | None = None) -> ModelCard:
    """The card of a preset. ``recipes`` is a folder in which to look for those that train it."""
    about = preset(name)
    architecture = load_preset(name)
    of = profile(architecture)
    data = ModelCardData(
        library_name="moe-zoo",
        license=about.license,
        license_name=about.license_name,
        pipeline_tag="text2text-generation" if getattr(architecture, "encoder", None) else "text-generation",
        tags=["moe-zoo", "mixture-of-experts", about.family],
        base_model=about.hub,
    )
    sizes = [
        ("parameters", parameters_text(of.total)),
        ("met by one token", parameters_text(of.active)),
        ("of them embedding and head", parameters_text(of.embedding)),
        (f"forward FLOPs per token, rows of {SEQ_LEN:,}", f"{of.forward_flops:.3g}"),
        (f"training FLOPs per token, rows of {SEQ_LEN:,}", f"{of.training_flops:.3g}"),
        *((f"weights in {dtype}", bytes_text(size)) for dtype, size in of.load_bytes.items()),
    ]
    training = [
        (str(stage), *(bytes_text(sizes[world]) for world in WORLDS)) for stage, sizes in of.training_bytes.items()
    ]
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name}",
        about.about or f"Numbers from {about.source}.",
        table(("size", ""), sizes),
        table(("shape", ""), shape_rows(architecture)),
        "## Memory to train\nWeights, gradients, master weights and AdamW moments of one rank in bf16, no activations and "
        "no expert parallelism (which divides the experts' share further).",
        table(("ZeRO stage", *(f"{world:,} rank{'s' * (world > 1)}" for world in WORLDS)), training),
        "## Use",
        _usage(name, about),
        _trained_by(name, recipes),
        f"## Licence and source\n{about.license_name or about.license or 'no weights were published'}; {about.source}.",
    ]
    return ModelCard("\n\n".join(filter(None, parts)) + "\n", ignore_metadata_errors=False)


def write_all(folder: Path, recipes: Path) -> None:
    """Every preset's card, and a page that lists them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in all_cards(recipes).items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")


def all_cards(recipes: Path) -> dict[str, str]:
    """Page -> text, the list of all as README."""
    pages = {name: card(name, recipes).content for name in preset_names()}
    rows = []
    for name in preset_names():
        of = profile(load_preset(name))
        rows.append(
            (f"[{name}]({name}.md)", parameters_text(of.total), parameters_text(of.active), preset(name).family)
        )
    head = "# Model cards\nWritten by `moe-zoo card --all docs/cards`; a test keeps them so.\n\n"
    return {"README": head + table(("preset", "parameters", "met by one token", "family"), rows) + "\n"} | pages


def table(head: Sequence[str], rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _usage(name: str, about: Preset) -> str:
    architecture = load_preset(name)
    lines = [f"model: {{preset: {name}}}"]
    if about.hub:
        lines.append(f"init: {about.hub}  # or leave it out and begin afresh")
    if architecture.encoder:
        lines.append("data: {encoder_len: 256}  # of each row; the decoder goes on")
    recipe = "In a recipe:\n```yaml\n" + "\n".join(lines) + "\n```"
    if not about.hub and weight_bytes(architecture, 4) > LARGE:
        return recipe
    what = f'"{about.hub}")' if about.hub else f'"{name}")  # fresh weights'
    return f"```python\nimport moe_zoo\n\nmodel = moe_zoo.load({what}\n```\n{recipe}"


def _trained_by(name: str, recipes: Path | None) -> str:
    found = sorted(path for path in recipes.rglob("*.yaml") if _preset_of(path) == name) if recipes else []
    return (
        f"Trained by {', '.join(f'`recipes/{path.relative_to(recipes).as_posix()}`' for path in found)}."
        if found
        else ""
    )


def _preset_of(recipe: Path) -> str | None:
    """The preset that a recipe names itself or through what it extends."""
    values = parse_yaml(recipe.read_text(encoding="utf-8"))
    model = values.get("model")
    if isinstance(model, dict) and "preset" in model:
        return str(model["preset"])
    extended = values.get("extends")
    return _preset_of(recipe.parent / extended) if extended and model is None else None
