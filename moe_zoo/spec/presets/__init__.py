"""Named sizes. One YAML file per family; each preset cites where its numbers come from."""

from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from moe_zoo.spec.accounting import num_active_parameters, num_parameters
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.errors import RecipeError, did_you_mean
from moe_zoo.spec.yaml_text import parse_yaml


class PresetSummary(NamedTuple):
    """One line of ``moe-zoo presets``."""

    name: str
    parameters: int
    active_parameters: int  # met by one token
    source: str


def preset_names() -> list[str]:
    """Every preset, sorted."""
    return sorted(_presets())


def load_preset(name: str) -> Architecture:
    """The architecture called ``name``."""
    return Architecture.from_dict(preset_values(name))


def preset_values(name: str) -> dict[str, Any]:
    """The numbers of a preset as they stand in its file, for a recipe to alter."""
    return dict(_preset(name)["architecture"])


def preset_summary(name: str) -> PresetSummary:
    """Size and origin of a preset."""
    architecture = load_preset(name)
    return PresetSummary(
        name, num_parameters(architecture), num_active_parameters(architecture), str(_preset(name)["source"])
    )


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
