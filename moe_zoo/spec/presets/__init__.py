"""Named sizes. One YAML file per family; each preset cites where its numbers come from."""

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.errors import RecipeError, did_you_mean
from moe_zoo.spec.yaml_text import parse_yaml


class Preset(NamedTuple):
    """What is known of a preset besides its numbers."""

    name: str
    source: str  # where the numbers come from
    family: str  # model_type by which transformers reads it
    license: str | None = None  # of the published weights, by the Hub's names; None: none were published
    license_name: str | None = None  # where ``license`` is "other"
    hub: str | None = None  # id of the published weights
    about: str | None = None  # a few sentences for its card
    published: tuple[float | None, ...] | None = None  # billions of parameters, total and met by one token


def preset_names() -> list[str]:
    """Every preset, sorted."""
    return sorted(_presets())


def is_preset(name: str) -> bool:
    """Whether ``name`` means a preset: a folder of that name was put there by somebody, and comes first."""
    return name in _presets() and not Path(name).is_dir()


def load_preset(name: str) -> Architecture:
    """The architecture called ``name``."""
    return Architecture.from_dict(preset_values(name))


def preset_values(name: str) -> dict[str, Any]:
    """The numbers of a preset as they stand in its file, for a recipe to alter."""
    return dict(_preset(name)["architecture"])


def preset(name: str) -> Preset:
    """What is known of it."""
    values = {key: value for key, value in _preset(name).items() if key != "architecture"}
    published = tuple(values.pop("published", ())) or None
    source = values.pop("source", None) or f"config.json of {values['hub']}"
    return Preset(name, source, **values, published=published)


def _preset(name: Any) -> dict[str, Any]:
    if not isinstance(name, str) or name not in _presets():
        raise RecipeError(f"model.preset: {name!r}; unknown preset; {did_you_mean(str(name), _presets())}")
    return _presets()[name]


@cache
def _presets() -> dict[str, dict[str, Any]]:
    presets: dict[str, dict[str, Any]] = {}
    for file in resources.files(__name__).iterdir():
        if file.name.endswith(".yaml"):
            family = parse_yaml(file.read_text(encoding="utf-8"))
            assert not presets.keys() & family.keys(), f"{file.name} repeats a name of another family"
            presets |= family
    return presets
