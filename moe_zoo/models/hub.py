"""``moe_zoo.load``: a model from a folder, a Hub id, or the name of a preset."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from huggingface_hub import snapshot_download
from transformers import PretrainedConfig
from transformers.utils import logging

from moe_zoo.models.causal_lm import MoeZooForCausalLM
from moe_zoo.models.config import MoeZooConfig
from moe_zoo.models.families import FAMILIES
from moe_zoo.models.init import initialize
from moe_zoo.models.seq2seq_lm import MoeZooForSeq2SeqLM, model_class
from moe_zoo.models.upstream import load_upstream
from moe_zoo.spec.accounting import weight_bytes
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.errors import CheckpointError, did_you_mean
from moe_zoo.spec.presets import load_preset, preset_names


def load(name: str | Path, *, seed: int = 0, **kwargs: Any) -> MoeZooForCausalLM | MoeZooForSeq2SeqLM:
    """A model ready to generate: trained weights of a folder or Hub id, or a preset with fresh ones.

    ``kwargs`` go to ``from_pretrained``. Raises ``CheckpointError`` if there is no such model.
    """
    if str(name) in preset_names():
        architecture = load_preset(str(name))
        _check_fits(str(name), architecture)
        model = from_architecture(architecture)
        initialize(model.model, seed)
        return model.eval()
    if Path(name).exists() and not (Path(name) / "config.json").is_file():
        raise CheckpointError(
            f"load: {name}; a model folder holds a config.json, this one does not; give the folder that "
            f"save_pretrained or moe-zoo export wrote"
        )
    if not Path(name).exists() and len(Path(name).parts) > 1 and Path(name).parent.is_dir():
        raise CheckpointError(f"load: {name}; no such folder in {Path(name).parent}; check the path")
    try:
        values = PretrainedConfig.get_config_dict(name)[0]
        model_type = values.get("model_type")
        if model_type in FAMILIES:
            return load_upstream(_folder(name), model_type)
        if model_type == MoeZooConfig.model_type:
            return model_class(Architecture.from_dict(values["architecture"])).from_pretrained(name, **kwargs)
    except OSError as error:
        raise CheckpointError(
            f"load: {name}; not a folder, a reachable Hub id or a preset ({str(error).splitlines()[0]}); "
            f"{did_you_mean(str(name), preset_names())}"
        ) from None
    raise CheckpointError(
        f"load: {name}; its config.json says model_type {model_type}, which moe-zoo does not build; "
        f"{did_you_mean(str(model_type), [MoeZooConfig.model_type, *FAMILIES])}"
    )


def _check_fits(name: str, architecture: Architecture) -> None:
    """Refuse to draw more weights than this machine can hold."""
    needed, free = weight_bytes(architecture, 4), psutil.virtual_memory().available
    if needed > free:
        raise CheckpointError(
            f"load: {name}; its fresh fp32 weights are {needed / 2**30:,.1f} GiB, {free / 2**30:,.1f} GiB of memory are "
            f"free; train it from a recipe, which gives each rank its share, or load a smaller preset"
        )


def _folder(name: str | Path) -> Path:
    """Where the files of a model are: the folder itself, or what the Hub's client fetched."""
    if Path(name).is_dir():
        return Path(name)
    return Path(snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors", "*.model"]))


def from_architecture(architecture: Architecture, **config: Any) -> MoeZooForCausalLM | MoeZooForSeq2SeqLM:
    """A model of this shape, weights still to be filled."""
    return model_class(architecture)(MoeZooConfig(architecture=architecture.to_dict(), **config))


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers draws a bar for each file; beside our own display it is noise."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
