"""Recipe files: YAML, one ``extends``, a preset as the model, ``key=value`` overrides from the command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_zoo.spec.errors import RecipeError
from moe_zoo.spec.presets import preset_names, preset_values
from moe_zoo.spec.recipe import Recipe
from moe_zoo.spec.yaml_text import parse_yaml

Values = dict[str, Any]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, with ``train.steps=50`` and the like put over it.

    ``extends: parent.yaml`` is relative to the file. A section is merged key by key, a list is replaced, and naming
    a preset starts the model anew. ``train.steps`` below the schedule's warmup and decay shortens these in proportion.
    Raises ``RecipeError``, one line that begins with the file.
    """
    written, over = _read(Path(path), ()), _parse_overrides(overrides)
    values = _over(_shorten_schedule(written, over), over)
    try:
        return Recipe.from_dict({key: _resolve_model(v) if key == "model" else v for key, v in values.items()})
    except RecipeError as error:
        raise RecipeError(f"{_origin(str(error), path, overrides)}: {error}") from None


def recipe_schema() -> Values:
    """JSON schema of a recipe file, for editors. Nothing is required: a file may leave it to the one it extends."""
    schema = Recipe.model_json_schema()
    for group in (schema, *schema["$defs"].values()):
        group.pop("required", None)
    schema["$defs"]["Architecture"]["properties"] |= {
        "preset": {
            "type": "string",
            "enum": preset_names(),
            "description": "A named size, for the other keys to alter.",
        }
    }
    schema["properties"] |= {"extends": {"type": "string", "description": "A recipe to start from, beside this file."}}
    return schema


def _read(path: Path, children: tuple[Path, ...]) -> Values:
    """The values of a file over those of its ancestors. ``children`` are the files that led here."""
    if path.resolve() in children:
        chain = " -> ".join(child.name for child in (*children, path))
        raise RecipeError(f"{path}: extends: {chain}; a recipe cannot extend itself; remove one")
    values = _values(path)
    parent = values.pop("extends", None)
    if parent is None:
        return values
    if not isinstance(parent, str):
        raise RecipeError(f"{path}: extends: {parent!r}; must be one file; write its path, relative to this file")
    return _over(_read(path.parent / parent, (*children, path.resolve())), values)


def _values(path: Path) -> Values:
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(
            f"{path}: {(error.strerror or 'unreadable').lower()}; must be a recipe; check the path"
        ) from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: not text; must be YAML in UTF-8; check the path") from None
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise RecipeError(f"{path}: {type(values).__name__}; a recipe is a group of keys; begin with 'name: ...'")
    return values


def _parse_overrides(overrides: Sequence[str]) -> Values:
    merged: Values = {}
    for override in overrides:
        dotted, equals, text = override.partition("=")
        keys = dotted.split(".")
        if not equals or not all(keys):
            raise RecipeError(f"command line: {override!r}; an override is key=value; write for example train.steps=50")
        value = _parse_value(override, text)
        for key in reversed(keys):
            value = {key: value}
        merged = _merge(merged, value)
    return merged


def _parse_value(override: str, text: str) -> Any:
    try:
        return parse_yaml(text)
    except RecipeError as error:
        raise RecipeError(f"command line: {override!r}; {error}") from None


def _shorten_schedule(written: Values, over: Values) -> Values:
    """Make ``train.steps=5`` enough for a short look at a long recipe: what it says of the schedule keeps its shape."""
    before, after = (_number(values, "train", "steps") for values in (written, over))
    warmup, decay = (_number(written, "optim", key) for key in ("warmup_steps", "decay_steps"))
    asked = over.get("optim")
    is_asked = isinstance(asked, dict) and not asked.keys().isdisjoint(("warmup_steps", "decay_steps"))
    if is_asked or not 0 < after < before or (warmup < after and warmup + decay <= after):
        return written
    shorter = {"warmup_steps": after * warmup // before, "decay_steps": max(min(decay, 1), after * decay // before)}
    return _merge(written, {"optim": shorter})


def _number(values: Values, section: str, key: str) -> int:
    """A whole number of values that nobody has checked yet; 0 where there is none."""
    group = values.get(section)
    number = group.get(key) if isinstance(group, dict) else None
    return number if type(number) is int else 0


def _origin(error: str, path: str | Path, overrides: Sequence[str]) -> str:
    """Who wrote the key an error begins with."""
    key = error.partition(":")[0] + "."
    overridden = any((override.partition("=")[0] + ".").startswith(key) for override in overrides)
    return "command line" if overridden else str(path)


def _over(parent: Values, child: Values) -> Values:
    """``child`` over ``parent``. The parent's model goes when the child names a preset: its numbers fit another."""
    model = child.get("model")
    if isinstance(model, dict) and "preset" in model:
        parent = {key: value for key, value in parent.items() if key != "model"}
    return _merge(parent, child)


def _merge(below: Values, above: Values) -> Values:
    """``above`` over ``below``, group by group."""
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            value = _merge(below[key], value)
        merged[key] = value
    return merged


def _resolve_model(model: Any) -> Any:
    if not isinstance(model, dict) or "preset" not in model:
        return model
    changes = {key: value for key, value in model.items() if key != "preset"}
    return _merge(preset_values(model["preset"]), changes)
