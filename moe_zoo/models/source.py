"""Where a run's first weights come from: a folder of any family, read slice by slice."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PretrainedConfig

from moe_zoo.models.config import MoeZooConfig
from moe_zoo.models.families import ALIASES, FAMILIES
from moe_zoo.models.mapping import UpstreamWeights
from moe_zoo.models.weight_files import WeightFiles
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.errors import CheckpointError, did_you_mean
from moe_zoo.spec.presets import preset_names

Cut = Callable[[Tensor], Tensor]
TRAINING_ONLY = {"init_std", "jitter", "capacity_factor", "eval_capacity_factor"}  # of a router and its beginnings
FETCHED = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


class Source:
    """A model on disk: its numbers and its tensors by our names. Raises ``CheckpointError``, one line."""

    def __init__(self, name: str | Path):
        self.name = str(name)
        self.values_there = config_values(local_folder(name) or _fetched(self.name, ["config.json"]))
        model_type = self.values_there.get("model_type")
        self.family = FAMILIES.get(ALIASES.get(model_type, model_type))
        if self.family is None and model_type != MoeZooConfig.model_type:
            known = [MoeZooConfig.model_type, *FAMILIES, *ALIASES]
            raise CheckpointError(
                f"load: {name}; its config.json says model_type {model_type}, which moe-zoo does not build; "
                f"{did_you_mean(str(model_type), known)}"
            )

    @cached_property
    def folder(self) -> Path:
        """Where its files are; fetched when first asked for."""
        return local_folder(self.name) or _fetched(self.name, FETCHED)

    @cached_property
    def config(self) -> PretrainedConfig:
        """As transformers reads it."""
        try:
            return self._config()
        except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{self.name}: config.json: {reason}; transformers does not take it as a {self.family_name}; fetch it again"
            ) from None

    def _config(self) -> PretrainedConfig:
        if self.family is None:
            return MoeZooConfig.from_pretrained(self.folder)
        code = {"auto_map"} if self.family.is_in_transformers else set()  # elsewhere others need to know it
        values = {key: value for key, value in self.values_there.items() if key not in {"model_type"} | code}
        values.pop("quantization_config", None)  # what is read is no longer quantised
        return self.family.make_config(values)

    @property
    def family_name(self) -> str:
        """The ``model_type`` that is built."""
        return self.family.model_type if self.family else MoeZooConfig.model_type

    @cached_property
    def architecture(self) -> Architecture:
        """Its numbers."""
        config = self.config
        try:
            return self.family.read(config) if self.family else config.to_architecture()
        except (AttributeError, TypeError, KeyError, IndexError) as error:  # a key that is missing, or of another kind
            raise CheckpointError(
                f"{self.name}: config.json: {' '.join(str(error).split())}; it does not say what a {self.family_name} is; "
                f"fetch it again"
            ) from None

    @cached_property
    def files(self) -> WeightFiles:
        """Its tensors, by the names they have there."""
        return WeightFiles(self.folder)

    def values(self, name: str, experts: range | None = None, cut: Cut = lambda whole: whole) -> Tensor:
        """Parameter or buffer ``name`` of our model, of some ``experts`` alone where it is a stack.

        ``cut`` is of one expert where it is a stack. What is held at once is one tensor of a file and the slice.
        """
        if self._upstream is not None:
            return self._upstream.values(name, experts, cut)
        whole = self.files.read(f"model.{name}", experts)
        return cut(whole) if ".experts." not in name else _cut_each(whole, cut)

    def where(self, name: str) -> str:
        """The file and the tensor of which a parameter of ours is made."""
        return self._upstream.where(name) if self._upstream else self.files.where(f"model.{name}")

    @cached_property
    def _upstream(self) -> UpstreamWeights | None:
        return UpstreamWeights(self.family, self.architecture, self.files) if self.family else None


def check_source(source: Source, architecture: Architecture) -> None:
    """Raise ``CheckpointError`` that names the first number in which a recipe's model is another than the source's."""
    if found := difference(source.architecture, architecture):
        key, there, here = found
        raise CheckpointError(
            f"init: {source.name}; its {key} is {there}, the recipe's model.{key} is {here}; `moe-zoo info {source.name} "
            f"--model` prints the model section that fits"
        )


def difference(there: Architecture, here: Architecture) -> tuple[str, Any, Any] | None:
    """(key, its two values) of the first number that differs, of those that a trained model still has."""
    left, right = (_flat(_without_idle_numbers(model).to_dict()) for model in (there, here))
    for key in sorted(left.keys() | right.keys()):
        if key.split(".")[-1] not in TRAINING_ONLY and not _is_alike(left.get(key), right.get(key)):
            return key, left.get(key), right.get(key)
    return None


def _without_idle_numbers(architecture: Architecture) -> Architecture:
    """What can be said in two ways, in one; numbers that nothing reads (of one group, of no dense layer) as usual."""
    moe = architecture.moe
    if moe is None:
        return architecture
    if moe.router.num_groups == 1:
        moe = replace(moe, router=replace(moe.router, groups_per_token=1, group_score="max"))
    dense = tuple(layer for layer in range(architecture.num_layers) if not architecture.is_sparse(layer))
    moe = replace(moe, first_layer=0, every=1, dense_layers=dense)
    return replace(
        architecture, moe=moe, feed_forward=architecture.feed_forward if architecture.num_dense else moe.experts
    )


def _flat(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{path}{key}.") if isinstance(value, dict) else {path + key: value}
    return flat


def _is_alike(there: Any, here: Any) -> bool:
    if isinstance(there, float) and isinstance(here, float):
        return math.isclose(there, here, rel_tol=1e-3)  # recipes and presets round what a file has in full
    return there == here or (isinstance(there, tuple | list) and isinstance(here, tuple | list) and [*there] == [*here])


def _cut_each(stack: Tensor, cut: Cut) -> Tensor:
    first = cut(stack[0])
    made = first.new_empty(len(stack), *first.shape)
    for own, whole in zip(made, stack, strict=True):
        own.copy_(cut(whole))
    return made


def local_folder(name: str | Path) -> Path | None:
    """The folder of that name; None: it can only be a Hub id."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(
                f"load: {name}; a model folder holds a config.json, this one does not; give the folder that "
                f"save_pretrained or moe-zoo export wrote"
            )
        return path
    if path.exists() or (len(path.parts) > 1 and path.parent.is_dir()):
        raise CheckpointError(f"load: {name}; no such folder in {path.parent}; check the path")
    return None


def _fetched(name: str, patterns: list[str]) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"load: {name}; not a folder, a reachable Hub id or a preset ({str(error).splitlines()[0]}); "
            f"{did_you_mean(name, preset_names())}"
        ) from None


def config_values(folder: Path) -> dict[str, Any]:
    """``config.json``. Raises ``CheckpointError`` if it is none."""
    try:
        return dict(PretrainedConfig.get_config_dict(folder)[0])
    except (OSError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{folder / 'config.json'}: {reason}; the file is damaged; fetch it again") from None
