"""What our models share in Hugging Face dress: from_pretrained, save_pretrained, recomputed activations.

The models and what they import from moe_zoo are also written, as one file, beside every one that is saved: with
``trust_remote_code=True`` it loads where moe-zoo is not installed.
"""

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from moe_zoo.models.config import MoeZooConfig
from moe_zoo.models.decoder import init_std

REMOTE_FILE = "modeling_moe_zoo.py"


class MoeZooPreTrainedModel(PreTrainedModel):
    """One of our networks as ``self.model``, which has ``embed``, ``layers``, ``head`` and an ``architecture``."""

    auto_name: ClassVar[str]  # of the Auto class that makes it
    config_class = MoeZooConfig
    base_model_prefix = "model"
    companions: Path | None = None  # folder whose tokenizer is saved with the model
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _tied_weights_keys: ClassVar[dict[str, str]] = {"model.head.weight": "model.embed.weight"}

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embed = value

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.model.head = value

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As transformers does it, and the numbers that are saved say so."""
        made = super().resize_token_embeddings(*args, **kwargs)
        self.model.architecture = dataclasses.replace(self.model.architecture, vocab_size=made.num_embeddings)
        self.config.architecture = self.model.architecture.to_dict()
        return made

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable = checkpoint, every_n_layers: int = 1
    ) -> None:
        for index, block in enumerate(self.model.layers.values()):
            recompute_in_training(block, gradient_checkpointing_func if enable and not index % every_n_layers else None)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """transformers calls it for what no file filled; ``moe_zoo.load`` of a preset draws the weights of training."""
        paths = {id(child): path for path, child in self.model.named_modules()}
        for name, param in module.named_parameters(recurse=False):
            std = init_std(f"{paths.get(id(module), '')}.{name}", self.model.architecture)
            if std is not None:
                param.normal_(std=std)
            else:
                param.fill_(0.0 if name.endswith("bias") else 1.0)
        for buffer in module.buffers(recurse=False):
            buffer.zero_()

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Weights and configuration: by the names of its family, or with the code to load them without moe-zoo."""
        if self.config.upstream is not None:
            importlib.import_module("moe_zoo.models.saving").save_upstream(self, Path(save_directory), **kwargs)
            return
        stem = Path(REMOTE_FILE).stem
        self.config.auto_map = {
            "AutoConfig": f"{stem}.MoeZooConfig",
            self.auto_name: f"{stem}.{type(self).__name__}",
        }
        super().save_pretrained(save_directory, **kwargs)
        (Path(save_directory) / REMOTE_FILE).write_text(remote_code())
        if self.companions is not None:
            importlib.import_module("moe_zoo.models.saving").copy_companions(self, Path(save_directory))


def token_loss(logits: Tensor, targets: Tensor, num_items: Tensor | int | None) -> Tensor:
    """Mean over the targets that are not -100, or their sum over ``num_items``."""
    flat = logits.flatten(0, 1).float(), targets.flatten()
    return F.cross_entropy(*flat) if num_items is None else F.cross_entropy(*flat, reduction="sum") / num_items


def recompute_in_training(block: nn.Module, run: Callable | None) -> None:
    """Let ``run(forward, *inputs)`` keep a block's inputs alone and run it again in backward; None: no longer."""
    block.__dict__.pop("forward", None)
    block.gradient_checkpointing = run is not None  # where transformers looks
    if run is not None:
        forward = block.forward
        block.forward = lambda *inputs: run(forward, *inputs) if block.training else forward(*inputs)


def remote_code() -> str:
    """One file that holds this class and all it needs: this very file, if it is such an export already."""
    here = Path(__file__)
    if here.name == REMOTE_FILE:
        return here.read_text()
    return importlib.import_module("moe_zoo.models.remote_code").bundle()
