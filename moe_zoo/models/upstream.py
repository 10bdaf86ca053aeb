"""Models of other people's families: a folder of theirs -> ours, and back."""

import re
import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from moe_zoo.models.causal_lm import MoeZooForCausalLM
from moe_zoo.models.config import MoeZooConfig
from moe_zoo.models.families import FAMILIES, Family
from moe_zoo.models.mapping import rules_by_parameter, upstream_tensors
from moe_zoo.models.seq2seq_lm import MoeZooForSeq2SeqLM, model_class
from moe_zoo.models.source import Source, difference
from moe_zoo.models.switch import Network
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.errors import CheckpointError, MoeZooError

NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")  # of another family's configuration
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


def load_upstream(source: Source, dtype: torch.dtype | None = torch.float32) -> MoeZooForCausalLM | MoeZooForSeq2SeqLM:
    """The model of a folder that another library wrote; ``dtype`` None keeps that of each tensor, and
    what is quantised comes in bf16, as its makers convert it.
    """
    config, architecture = source.config, source.architecture
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    ids = {name: getattr(config, name, None) for name in names}
    with torch.device("meta"):
        kind = model_class(architecture)
        model = kind(MoeZooConfig(architecture=architecture.to_dict(), upstream=config.to_dict(), **ids))
    source.files.quantised_as = dtype or torch.bfloat16
    _fill(model.model, source, dtype)
    model.tie_weights()
    check_copies(source)
    padding = source.family.padding(architecture)
    unused = [name for name in source.files.unused() if name not in padding]
    if left := [name for name in unused if not _is_beyond(name, source)]:
        raise CheckpointError(
            f"{source.folder}: {left[0]}{f' and {len(left) - 1} more' if len(left) > 1 else ''}; "
            f"{source.family.model_type} has no such weight; the files are another model's than config.json says"
        )
    if (source.folder / "generation_config.json").is_file():
        model.generation_config = _generation_config(source.folder)
    model.companions = source.folder
    return model.eval()


def _generation_config(folder: Path) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder / 'generation_config.json'}: {reason}; the file is damaged; fetch it again, or remove it"
        ) from None


@torch.no_grad()
def _fill(model: Network, source: Source, dtype: torch.dtype | None) -> None:
    for path, module in model.named_modules():
        for name, param in list(module.named_parameters(recurse=False)):
            full = f"{path}.{name}".lstrip(".")
            if full == "head.weight" and model.architecture.tie_embeddings:
                continue
            values = _checked(source, full, param)
            module.register_parameter(name, nn.Parameter(values.to(dtype or values.dtype)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            full = f"{path}.{name}".lstrip(".")
            module.register_buffer(name, _checked(source, full, buffer).to(buffer.dtype))


def check_copies(source: Source) -> None:
    """Refuse a folder of a family that holds a tensor twice, in two versions."""
    copies = source.family.aliases(source.architecture)
    rules = rules_by_parameter(source.family, source.architecture)
    if source.architecture.tie_embeddings and "head.weight" in rules:
        copies = copies | {rules["head.weight"][0].theirs: rules["embed.weight"][0].theirs}
    for copy, original in copies.items():
        if copy in source.files.file_of and not torch.equal(source.files.read(copy), source.files.read(original)):
            raise CheckpointError(
                f"{source.folder}: {copy}; it is not equal to {original}, and config.json makes them one; say otherwise "
                f"there (tie_word_embeddings) where the family can, or load the model with transformers"
            )


def _checked(source: Source, name: str, meta: Tensor) -> Tensor:
    values = source.values(name)
    if values.shape != meta.shape:
        raise CheckpointError(
            f"{source.where(name)}: shape {tuple(values.shape)} as {name}; config.json says {tuple(meta.shape)}; one of the "
            f"two is another model's"
        )
    return values.contiguous()


def _is_beyond(name: str, source: Source) -> bool:
    """Tensors that no forward reads: those of multi-token prediction, behind the last layer or apart, and rotations."""
    num_layers, more = source.architecture.num_layers, source.values_there.get("num_nextn_predict_layers") or 0
    match = re.match(r"model\.layers\.(\d+)\.", name)
    is_behind = match is not None and num_layers <= int(match[1]) < num_layers + more
    return is_behind or name.startswith(("model.mtp.", "model.mtp_")) or name.endswith("inv_freq")


def _copies(family: Family, architecture: Architecture, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Written where transformers would not make them itself: without tied embeddings it unties all of them."""
    if architecture.tie_embeddings:
        return {}
    return {copy: tensors[original].clone() for copy, original in family.aliases(architecture).items()}


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


def with_decoder(
    model: MoeZooForCausalLM | MoeZooForSeq2SeqLM, decoder: Network
) -> MoeZooForCausalLM | MoeZooForSeq2SeqLM:
    """``decoder`` dressed as ``model`` was: the same ids, tokenizer and settings, and the family that now fits."""
    config = model.config
    ids = {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model_type = family_that_fits(decoder.architecture)
    upstream = None
    if model_type is not None:
        kept = {key: value for key, value in (config.upstream or {}).items() if key in KEPT}
        upstream = {"model_type": model_type} | kept | {name: value for name, value in ids.items() if value is not None}
    with torch.device("meta"):
        kind = model_class(decoder.architecture)
        made = kind(MoeZooConfig(architecture=decoder.architecture.to_dict(), upstream=upstream, **ids))
    made.model = decoder
    made.companions, made.generation_config = model.companions, model.generation_config
    return made.eval()


def save_upstream(
    model: MoeZooForCausalLM | MoeZooForSeq2SeqLM,
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


def copy_companions(model: MoeZooForCausalLM | MoeZooForSeq2SeqLM, folder: Path) -> None:
    """The tokenizer that the model was loaded with, file by file."""
    if model.companions is None or model.companions.resolve() == folder.resolve():
        return
    for pattern in TOKENIZER_FILES:
        for file in model.companions.glob(pattern):
            shutil.copy2(file, folder / file.name)
