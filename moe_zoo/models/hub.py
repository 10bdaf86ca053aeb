"""``moe_zoo.load``: a model from a folder, a Hub id, or the name of a preset."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from transformers.utils import logging

from moe_zoo.models.causal_lm import MoeZooForCausalLM
from moe_zoo.models.config import MoeZooConfig
from moe_zoo.models.init import initialize
from moe_zoo.models.seq2seq_lm import MoeZooForSeq2SeqLM, model_class
from moe_zoo.models.source import Source
from moe_zoo.models.switch import make_network
from moe_zoo.models.upstream import load_upstream
from moe_zoo.spec.accounting import weight_bytes
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.errors import CheckpointError
from moe_zoo.spec.presets import is_preset, load_preset


def load(
    name: str | Path, *, seed: int = 0, dtype: torch.dtype | Literal["auto"] = torch.float32, **kwargs: Any
) -> MoeZooForCausalLM | MoeZooForSeq2SeqLM:
    """A model ready to generate: trained weights of a folder or Hub id, or a preset with fresh ones.

    ``dtype`` "auto" keeps what the files hold. ``kwargs`` go to ``from_pretrained`` of a model of ours. Raises
    ``CheckpointError`` if there is no such model.
    """
    if is_preset(str(name)):
        architecture = load_preset(str(name))
        _check_fits(str(name), architecture, 4)
        model = from_architecture(architecture)
        initialize(model.model, seed)
        return model.to(torch.float32 if dtype == "auto" else dtype).eval()
    source = Source(name)
    _check_fits(str(name), source.architecture, 2 if dtype == "auto" else dtype.itemsize)
    if source.family is None:
        _check_weights(source)
        model = model_class(source.architecture).from_pretrained(source.folder, dtype=dtype, **kwargs)
        model.companions = source.folder
        return model
    return load_upstream(source, None if dtype == "auto" else dtype)


def _check_fits(name: str, architecture: Architecture, itemsize: int) -> None:
    """Refuse to hold more weights than this machine can."""
    needed, free = weight_bytes(architecture, itemsize), psutil.virtual_memory().available
    if needed > free:
        raise CheckpointError(
            f"load: {name}; its weights at {itemsize} bytes each are {needed / 2**30:,.1f} GiB, {free / 2**30:,.1f} GiB of "
            f"memory are free; train it from a recipe, which gives each rank its share, or load a smaller model"
        )


def _check_weights(source: Source) -> None:
    """Refuse a folder of ours that is not whole: transformers would draw what is missing, and say so in a warning."""
    with torch.device("meta"):
        network = make_network(source.architecture)
    wanted = {f"model.{name}": values for name, values in (*network.named_parameters(), *network.named_buffers())}
    copy = {"model.head.weight"} if source.architecture.tie_embeddings else set()
    if unknown := sorted(source.files.file_of.keys() - wanted.keys() - copy):
        raise CheckpointError(
            f"{source.files.where(unknown[0])}; the model of config.json has no such weight; one of the two is another model's"
        )
    for name, values in wanted.items():
        if (shape := source.files.shape(name)) != tuple(values.shape):
            raise CheckpointError(
                f"{source.files.where(name)}: shape {shape}; config.json says {tuple(values.shape)}; one of the two is another "
                f"model's"
            )


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
