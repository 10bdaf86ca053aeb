"""A model of ours -> a folder of another's family, as transformers, vLLM and SGLang load it."""

import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from moe_zoo.models.families import FAMILIES, Family
from moe_zoo.models.mapping import upstream_tensors
from moe_zoo.models.source import difference
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.errors import MoeZooError

NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
TOKENIZER_FILES = (
    "tokenizer*",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.tiktoken",
)


def family_that_fits(architecture: Architecture) -> str | None:
    """The ``model_type`` under which transformers has a model of these very numbers; None: only we have it."""
    if architecture.moe and architecture.moe.router.eval_capacity_factor is not None:
        return None  # nobody else drops tokens when a model is used
    for family in (family for family in FAMILIES.values() if family.is_in_transformers):
        try:
            again = family.read(family.make_config(NO_IDS | family.write(architecture)))
        except (AttributeError, TypeError, MoeZooError, StrictDataclassError):
            continue  # the family asks for a part that this model has not
        if difference(again, architecture) is None:
            return family.model_type
    return None


def save_upstream(
    model: PreTrainedModel,
    folder: Path,
    max_shard_size: str = "5GB",
    state_dict: dict[str, Tensor] | None = None,
    is_main_process: bool = True,
    **_: object,
) -> None:
    """Write what transformers, vLLM and SGLang load: the family's configuration and names, each expert by itself.

    ``state_dict`` is that of the whole model, where a trainer gathered it.
    """
    if not is_main_process:
        return
    upstream = dict(model.config.upstream)
    family = FAMILIES[upstream["model_type"]]
    values = upstream | family.write(model.model.architecture)
    config = family.make_config({key: value for key, value in values.items() if key != "model_type"})
    config.dtype = model.dtype  # else transformers would round to what the model was loaded from
    if family.is_in_transformers:
        is_seq2seq = model.model.architecture.encoder is not None
        known = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if is_seq2seq else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        config.architectures = [known[family.model_type]]
    folder.mkdir(parents=True, exist_ok=True)
    named = {name.removeprefix("model."): values for name, values in (state_dict or model.state_dict()).items()}
    if model.model.architecture.tie_embeddings:
        named.pop("head.weight", None)
    tensors = dict(upstream_tensors(family, model.model.architecture, named.items()))
    tensors |= _copies(family, model.model.architecture, tensors)
    padding = family.padding(model.model.architecture)
    tensors |= {name: torch.zeros(shape, dtype=model.dtype) for name, shape in padding.items()}
    save_torch_state_dict(tensors, folder, max_shard_size=max_shard_size)
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    copy_companions(model, folder)


def copy_companions(model: PreTrainedModel, folder: Path) -> None:
    """The tokenizer that the model was loaded with, file by file."""
    if model.companions is None or model.companions.resolve() == folder.resolve():
        return
    for pattern in TOKENIZER_FILES:
        for file in model.companions.glob(pattern):
            shutil.copy2(file, folder / file.name)


def _copies(family: Family, architecture: Architecture, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Written where transformers would not make them itself: without tied embeddings it unties all of them."""
    if architecture.tie_embeddings:
        return {}
    return {copy: tensors[original].clone() for copy, original in family.aliases(architecture).items()}
