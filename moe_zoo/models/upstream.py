"""Models of other people's families: a folder of theirs -> ours, and back."""

import re
import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moe_zoo.models.causal_lm import MoeZooForCausalLM
from moe_zoo.models.config import MoeZooConfig
from moe_zoo.models.decoder import SparseDecoder
from moe_zoo.models.families import FAMILIES
from moe_zoo.models.mapping import upstream_tensors
from moe_zoo.models.source import Source, difference
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.errors import CheckpointError, MoeZooError

NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")  # of another family's configuration
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.tiktoken",
)


def load_upstream(source: Source, dtype: torch.dtype | None = torch.float32) -> MoeZooForCausalLM:
    """The model of a folder that another library wrote; ``dtype`` None keeps that of each tensor."""
    config, architecture = source.config, source.architecture
    ids = {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    with torch.device("meta"):
        model = MoeZooForCausalLM(MoeZooConfig(architecture=architecture.to_dict(), upstream=config.to_dict(), **ids))
    _fill(model.model, source, dtype)
    model.tie_weights()
    padding = source.family.padding(architecture)
    unused = [name for name in source.files.unused() if name not in padding]
    if left := [name for name in unused if not _is_beyond(name, architecture)]:
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
            values = _checked(source, full, param)
            module.register_parameter(name, nn.Parameter(values.to(dtype or values.dtype)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            full = f"{path}.{name}".lstrip(".")
            module.register_buffer(name, _checked(source, full, buffer).to(buffer.dtype))


def _checked(source: Source, name: str, meta: Tensor) -> Tensor:
    values = source.values(name)
    if values.shape != meta.shape:
        raise CheckpointError(
            f"{source.where(name)}: shape {tuple(values.shape)} as {name}; config.json says {tuple(meta.shape)}; one of the "
            f"two is another model's"
        )
    return values.contiguous()


def _is_beyond(name: str, architecture: Architecture) -> bool:
    """Tensors that no forward reads: layers behind the last (multi-token prediction), and stored rotations."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    tied = name == "lm_head.weight" and architecture.tie_embeddings
    is_later = bool(match and int(match[1]) >= architecture.num_layers) or name.startswith("model.mtp.")
    return is_later or name.endswith("inv_freq") or tied


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


def with_decoder(model: MoeZooForCausalLM, decoder: SparseDecoder) -> MoeZooForCausalLM:
    """``decoder`` dressed as ``model`` was: the same ids, tokenizer and settings, and the family that now fits."""
    config = model.config
    ids = {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model_type = family_that_fits(decoder.architecture)
    upstream = None
    if model_type is not None:
        kept = {key: value for key, value in (config.upstream or {}).items() if key in KEPT}
        upstream = {"model_type": model_type} | kept
    with torch.device("meta"):
        made = MoeZooForCausalLM(MoeZooConfig(architecture=decoder.architecture.to_dict(), upstream=upstream, **ids))
    made.model = decoder
    made.companions, made.generation_config = model.companions, model.generation_config
    return made.eval()


def save_upstream(model: MoeZooForCausalLM, folder: Path, max_shard_size: str = "5GB", **_: object) -> None:
    """Write what transformers, vLLM and SGLang load: the family's configuration and names, each expert by itself."""
    upstream = dict(model.config.upstream)
    family = FAMILIES[upstream["model_type"]]
    values = upstream | family.write(model.model.architecture)
    config = family.make_config({key: value for key, value in values.items() if key != "model_type"})
    if family.is_in_transformers:
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type]]
    folder.mkdir(parents=True, exist_ok=True)
    named = [*model.model.named_parameters(), *model.model.named_buffers()]
    tensors = dict(upstream_tensors(family, model.model.architecture, ((n, values.detach()) for n, values in named)))
    padding, dtype = family.padding(model.model.architecture), next(model.parameters()).dtype
    tensors |= {name: torch.zeros(shape, dtype=dtype) for name, shape in padding.items()}
    save_torch_state_dict(tensors, folder, max_shard_size=max_shard_size)
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    copy_companions(model, folder)


def copy_companions(model: MoeZooForCausalLM, folder: Path) -> None:
    """The tokenizer that the model was loaded with, file by file."""
    if model.companions is None or model.companions.resolve() == folder.resolve():
        return
    for pattern in TOKENIZER_FILES:
        for file in model.companions.glob(pattern):
            shutil.copy2(file, folder / file.name)
