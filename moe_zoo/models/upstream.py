"""Models of other people's families: a folder of theirs -> ours, and back."""

import re
import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from moe_zoo.models.causal_lm import MoeZooForCausalLM
from moe_zoo.models.config import MoeZooConfig
from moe_zoo.models.decoder import SparseDecoder
from moe_zoo.models.families import FAMILIES, Family
from moe_zoo.models.mapping import upstream_tensors
from moe_zoo.models.seq2seq_lm import MoeZooForSeq2SeqLM, model_class
from moe_zoo.models.source import Source
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.errors import CheckpointError

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.tiktoken",
)


def load_upstream(source: Source, dtype: torch.dtype | None = torch.float32) -> MoeZooForCausalLM | MoeZooForSeq2SeqLM:
    """The model of a folder that another library wrote; ``dtype`` None keeps that of each tensor."""
    config, architecture = source.config, source.architecture
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    ids = {name: getattr(config, name, None) for name in names}
    with torch.device("meta"):
        kind = model_class(architecture)
        model = kind(MoeZooConfig(architecture=architecture.to_dict(), upstream=config.to_dict(), **ids))
    _fill(model.model, source, dtype)
    model.tie_weights()
    _check_copies(source)
    if left := [name for name in source.files.unused() if not _is_beyond(name, architecture)]:
        raise CheckpointError(
            f"{source.folder}: {left[0]}{f' and {len(left) - 1} more' if len(left) > 1 else ''}; "
            f"{source.family.model_type} has no such weight; the files are another model's than config.json says"
        )
    if (source.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source.folder)
    model.companions = source.folder
    return model.eval()


@torch.no_grad()
def _fill(model: SparseDecoder, source: Source, dtype: torch.dtype | None) -> None:
    for path, module in model.named_modules():
        for name, param in list(module.named_parameters(recurse=False)):
            full = f"{path}.{name}".lstrip(".")
            if full == "head.weight" and model.architecture.tie_embeddings:
                continue
            values = _checked(full, source.values(full), param)
            module.register_parameter(name, nn.Parameter(values.to(dtype or values.dtype)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            full = f"{path}.{name}".lstrip(".")
            module.register_buffer(name, _checked(full, source.values(full), buffer).to(buffer.dtype))


def _check_copies(source: Source) -> None:
    """Tensors that a folder holds twice must be the same."""
    for copy, original in source.family.aliases(source.architecture).items():
        if copy in source.files.file_of and not torch.equal(source.files.read(copy), source.files.read(original)):
            raise CheckpointError(
                f"{source.folder}: {copy}; it is not equal to {original}, and this family has but one of them; train "
                f"the two as one, or load the model with transformers"
            )


def _checked(name: str, values: Tensor, meta: Tensor) -> Tensor:
    if values.shape != meta.shape:
        raise CheckpointError(
            f"weights of {name}: shape {tuple(values.shape)}; config.json says {tuple(meta.shape)}; one of the two is "
            f"another model's"
        )
    return values.contiguous()


def _is_beyond(name: str, architecture: Architecture) -> bool:
    """Tensors that no forward reads: layers behind the last (multi-token prediction), and stored rotations."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    tied = name == "lm_head.weight" and architecture.tie_embeddings
    return bool(match and int(match[1]) >= architecture.num_layers) or name.endswith("inv_freq") or tied


def _copies(family: Family, architecture: Architecture, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Written where transformers would not make them itself: without tied embeddings it unties all of them."""
    if architecture.tie_embeddings:
        return {}
    return {copy: tensors[original].clone() for copy, original in family.aliases(architecture).items()}


def save_upstream(
    model: MoeZooForCausalLM | MoeZooForSeq2SeqLM, folder: Path, max_shard_size: str = "5GB", **_: object
) -> None:
    """Write what transformers, vLLM and SGLang load: the family's configuration and names, each expert by itself."""
    upstream = dict(model.config.upstream)
    family = FAMILIES[upstream["model_type"]]
    values = upstream | family.write(model.model.architecture)
    config = AutoConfig.for_model(**values)
    is_seq2seq = model.model.architecture.encoder is not None
    known = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if is_seq2seq else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    config.architectures = [known[family.model_type]]
    folder.mkdir(parents=True, exist_ok=True)
    named = [*model.model.named_parameters(), *model.model.named_buffers()]
    tensors = dict(upstream_tensors(family, model.model.architecture, ((n, values.detach()) for n, values in named)))
    tensors |= _copies(family, model.model.architecture, tensors)
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
