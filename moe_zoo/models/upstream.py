"""Models of other people's families: a folder of theirs -> ours."""

import re
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from moe_zoo.models.causal_lm import MoeZooForCausalLM
from moe_zoo.models.config import MoeZooConfig
from moe_zoo.models.mapping import rules_by_parameter
from moe_zoo.models.saving import family_that_fits
from moe_zoo.models.seq2seq_lm import MoeZooForSeq2SeqLM, model_class
from moe_zoo.models.source import Source
from moe_zoo.models.switch import Network
from moe_zoo.spec.errors import CheckpointError

KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")  # of another family's configuration


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
