"""Weights of other people's models: safetensors of a folder -> our parameters, tensor by tensor, and back."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moe_zoo.models.causal_lm import MoeZooForCausalLM
from moe_zoo.models.config import MoeZooConfig
from moe_zoo.models.decoder import SparseDecoder
from moe_zoo.models.families import FAMILIES, Family, Rule
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.errors import CheckpointError

Cut = Callable[[Tensor], Tensor]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightFiles:
    """All tensors of a folder, read one at a time. Raises ``CheckpointError`` that names file and tensor."""

    def __init__(self, folder: Path):
        self.folder, self.seen = folder, set()
        self.file_of = self._index()

    def read(self, name: str) -> Tensor:
        """A tensor, whole."""
        if name not in self.file_of:
            raise CheckpointError(
                f"{self.folder}: {name}; no file of the folder has it; the download is incomplete or another model's"
            )
        path = self.folder / self.file_of[name]
        try:
            with safe_open(path, "pt") as file:
                self.seen.add(name)
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{path}: {name}; {reason}; fetch the file again") from None

    def unused(self) -> list[str]:
        """Tensors that nobody has read."""
        return sorted(self.file_of.keys() - self.seen)

    def _index(self) -> dict[str, str]:
        if (self.folder / INDEX).is_file():
            file_of: dict[str, str] = json.loads((self.folder / INDEX).read_text())["weight_map"]
            for missing in sorted({file for file in file_of.values() if not (self.folder / file).is_file()}):
                raise CheckpointError(f"{self.folder}: {missing}; {INDEX} names it and it is not there; fetch it")
            return file_of
        if (self.folder / SINGLE).is_file():
            try:
                with safe_open(self.folder / SINGLE, "pt") as file:
                    return dict.fromkeys(file.keys(), SINGLE)
            except SafetensorError as error:
                reason = " ".join(str(error).split())
                raise CheckpointError(
                    f"{self.folder / SINGLE}: {reason}; the file is truncated or damaged; fetch it again"
                ) from None
        pickled = next(iter(sorted(self.folder.glob("*.bin"))), None)
        if pickled is not None:
            raise CheckpointError(
                f"{pickled}: a pickle can run any code when it is read; moe-zoo reads safetensors alone; convert it with "
                f"transformers' save_pretrained"
            )
        raise CheckpointError(f"{self.folder}: no {SINGLE} and no {INDEX}; give a folder that holds a model's weights")


class UpstreamWeights:
    """Our parameters, made of the tensors of a folder."""

    def __init__(self, family: Family, architecture: Architecture, files: WeightFiles):
        self.files, self.num_experts = files, architecture.num_experts
        self.rules = rules_by_parameter(family, architecture)

    def values(self, name: str, experts: range | None = None, cut: Cut = lambda whole: whole) -> Tensor:
        """Parameter or buffer ``name``, of some ``experts`` alone where it is a stack.

        ``cut`` takes this rank's slice of each tensor, of each expert's where it is a stack: what is held at once is
        one tensor of a file and the slice.
        """
        pattern, layer = pattern_of(name)
        rules = self.rules[pattern]
        if "{expert}" not in rules[0].theirs:
            return cut(self._joined(rules, layer=layer))
        numbers = experts if experts is not None else range(self.num_experts)
        return torch.stack([cut(self._joined(rules, layer=layer, expert=expert)) for expert in numbers])

    def _joined(self, rules: list[Rule], **numbers: int | None) -> Tensor:
        blocks = [self.files.read(rule.theirs.format(**numbers)) for rule in rules]
        blocks = [block.t() if rule.is_transposed else block for rule, block in zip(rules, blocks, strict=True)]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-1)


def upstream_tensors(
    family: Family, architecture: Architecture, named: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Our parameters and buffers -> tensors by the names of the family, in the order given."""
    rules = rules_by_parameter(family, architecture)
    for name, values in named:
        pattern, layer = pattern_of(name)
        for rule in rules[pattern]:
            block = values.chunk(rule.blocks, dim=-1)[rule.block] if rule.blocks > 1 else values
            entries = enumerate(block) if "{expert}" in rule.theirs else [(None, block)]
            for expert, entry in entries:
                entry = entry.t() if rule.is_transposed else entry
                yield rule.theirs.format(layer=layer, expert=expert), entry.contiguous()


def rules_by_parameter(family: Family, architecture: Architecture) -> dict[str, list[Rule]]:
    """The rules of each of our parameters, blocks in order."""
    found: dict[str, list[Rule]] = {}
    for rule in family.rules_of(architecture):
        found.setdefault(rule.ours, []).append(rule)
    return {ours: sorted(rules, key=lambda rule: rule.block) for ours, rules in found.items()}


def pattern_of(name: str) -> tuple[str, int | None]:
    """``layers.3.norm`` -> (``layers.{layer}.norm``, 3)."""
    match = re.match(r"layers\.(\d+)\.", name)
    return (re.sub(r"^layers\.\d+\.", "layers.{layer}.", name), int(match[1])) if match else (name, None)


def load_upstream(folder: Path, model_type: str) -> MoeZooForCausalLM:
    """The model of a folder that another library wrote, in fp32."""
    family = FAMILIES[model_type]
    config = AutoConfig.from_pretrained(folder)
    architecture = family.read(config)
    ids = {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    with torch.device("meta"):
        model = MoeZooForCausalLM(MoeZooConfig(architecture=architecture.to_dict(), upstream=config.to_dict(), **ids))
    weights = UpstreamWeights(family, architecture, WeightFiles(folder))
    _fill(model.model, weights)
    model.tie_weights()
    if left := [name for name in weights.files.unused() if not _is_beyond(name, architecture)]:
        raise CheckpointError(
            f"{folder}: {left[0]}{f' and {len(left) - 1} more' if len(left) > 1 else ''}; {model_type} has no such weight; "
            f"the files are another model's than config.json says"
        )
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


@torch.no_grad()
def _fill(model: SparseDecoder, weights: UpstreamWeights) -> None:
    for path, module in model.named_modules():
        for name, param in list(module.named_parameters(recurse=False)):
            full = f"{path}.{name}".lstrip(".")
            if full == "head.weight" and model.architecture.tie_embeddings:
                continue
            module.register_parameter(name, nn.Parameter(_checked(full, weights.values(full).float(), param)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            full = f"{path}.{name}".lstrip(".")
            module.register_buffer(name, _checked(full, weights.values(full).float(), buffer))


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


def save_upstream(model: MoeZooForCausalLM, folder: Path, max_shard_size: str = "5GB", **_: object) -> None:
    """Write what transformers, vLLM and SGLang load: the family's configuration and names, each expert by itself."""
    upstream = dict(model.config.upstream)
    family = FAMILIES[upstream["model_type"]]
    values = upstream | family.write(model.model.architecture)
    config = AutoConfig.for_model(**values)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type]]
    folder.mkdir(parents=True, exist_ok=True)
    named = [*model.model.named_parameters(), *model.model.named_buffers()]
    tensors = dict(upstream_tensors(family, model.model.architecture, ((n, values.detach()) for n, values in named)))
    save_torch_state_dict(tensors, folder, max_shard_size=max_shard_size)
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
