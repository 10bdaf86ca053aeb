"""Our decoder in Hugging Face dress: from_pretrained, save_pretrained, generate. Letters: B batch, S new, K all keys.

This file and what it imports from moe_zoo are also written, as one file, beside every saved model: with
``trust_remote_code=True`` it loads where moe-zoo is not installed.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from moe_zoo.models.config import MoeZooConfig
from moe_zoo.models.decoder import SparseDecoder, init_std
from moe_zoo.spec.errors import MoeZooError

REMOTE_FILE = "modeling_moe_zoo.py"


class MoeZooForCausalLM(PreTrainedModel, GenerationMixin):
    """A SparseDecoder as ``self.model``; the names of its parameters are those of training, behind ``model.``."""

    config_class = MoeZooConfig
    base_model_prefix = "model"
    _no_split_modules: ClassVar[list[str]] = ["DecoderBlock", "ShortcutBlock"]
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    companions: Path | None = None  # folder whose tokenizer is saved with the model
    _tied_weights_keys: ClassVar[dict[str, str]] = {"model.head.weight": "model.embed.weight"}

    def __init__(self, config: MoeZooConfig):
        super().__init__(config)
        self.model = SparseDecoder(config.to_architecture())
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the last ``logits_to_keep`` positions (0: all); with ``labels`` the mean token loss.

        The loss holds no router losses: train with a recipe, whose balance is exact in every layout.
        """
        if self.model.architecture.experts_choose:
            check_rows_are_whole(attention_mask, is_continued=bool(use_cache) or past_key_values is not None)
        if self.training and self.is_activation_checkpointing:
            use_cache = False  # a second forward would add the same keys again
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        num_past = past_key_values.get_seq_length() if past_key_values is not None else 0
        mask = key_mask(attention_mask, input_ids.shape[1], num_past)
        if position_ids is None:
            position_ids = positions_after(attention_mask, input_ids, num_past)
        logits = self.model(input_ids, position_ids, mask, cache=past_key_values).logits
        loss = None
        if labels is not None:
            targets = F.pad(labels[:, 1:], (0, 1), value=-100)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return CausalLMOutputWithPast(loss, logits[:, -logits_to_keep:], past_key_values)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers does it. Refused where experts choose tokens: each new one would change the routes so far."""
        if self.model.architecture.experts_choose:
            check_rows_are_whole(None, is_continued=True)
        return super().generate(*args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embed = value

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head

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
            importlib.import_module("moe_zoo.models.upstream").save_upstream(self, Path(save_directory), **kwargs)
            return
        stem = Path(REMOTE_FILE).stem
        self.config.auto_map = {
            "AutoConfig": f"{stem}.MoeZooConfig",
            "AutoModelForCausalLM": f"{stem}.MoeZooForCausalLM",
        }
        super().save_pretrained(save_directory, **kwargs)
        (Path(save_directory) / REMOTE_FILE).write_text(remote_code())


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


def check_rows_are_whole(attention_mask: Tensor | None, *, is_continued: bool) -> None:
    """What a model whose experts choose can be asked: raises ``MoeZooError`` for the rest."""
    if is_continued or (attention_mask is not None and not bool(attention_mask.all())):
        raise MoeZooError(
            "router.choice: expert; who takes a token depends on its whole row, which can be neither continued nor "
            "padded; give whole rows without a cache, or train with router.choice token"
        )


def key_mask(attention_mask: Tensor | None, num_new: int, num_past: int) -> Tensor | None:
    """(B or 1, 1, S, K), True where a query may look; None where plain causal attention says the same."""
    has_padding = attention_mask is not None and not bool(attention_mask.all())
    if not has_padding and (num_past == 0 or num_new == 1):
        return None
    device = attention_mask.device if attention_mask is not None else None
    causal = torch.ones(num_new, num_past + num_new, dtype=torch.bool, device=device).tril(num_past)[None, None]
    if not has_padding:
        return causal
    itself = torch.zeros_like(causal)
    itself[..., num_past:] = torch.eye(num_new, dtype=torch.bool, device=device)
    return causal & attention_mask[:, None, None, :].bool() | itself  # a padded query must look somewhere


def positions_after(attention_mask: Tensor | None, input_ids: Tensor, num_past: int) -> Tensor:
    """Positions (B, S) of the new tokens, counted without padding."""
    num_new = input_ids.shape[1]
    if attention_mask is None:
        return torch.arange(num_past, num_past + num_new, device=input_ids.device).expand_as(input_ids)
    return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -num_new:]
