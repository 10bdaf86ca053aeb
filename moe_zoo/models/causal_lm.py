"""Our decoder in Hugging Face dress. Letters: B batch, S new, K all keys."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from moe_zoo.models.config import MoeZooConfig
from moe_zoo.models.decoder import SparseDecoder
from moe_zoo.models.pretrained import MoeZooPreTrainedModel, token_loss
from moe_zoo.spec.errors import MoeZooError


class MoeZooForCausalLM(MoeZooPreTrainedModel, GenerationMixin):
    """A SparseDecoder as ``self.model``; the names of its parameters are those of training, behind ``model.``."""

    auto_name = "AutoModelForCausalLM"
    _no_split_modules: ClassVar[list[str]] = ["DecoderBlock", "ShortcutBlock"]

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
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the last ``logits_to_keep`` positions (0: all); with ``labels`` the mean token loss.

        Over ``num_items_in_batch`` tokens, where a trainer adds up the losses of several batches. The loss holds no router
        losses: train with a recipe, whose balance is exact in every layout.
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
            loss = token_loss(logits, F.pad(labels[:, 1:], (0, 1), value=-100), num_items_in_batch)
        return CausalLMOutputWithPast(loss, logits[:, -logits_to_keep:], past_key_values)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers does it. Refused where experts choose tokens: each new one would change the routes so far."""
        if self.model.architecture.experts_choose:
            check_rows_are_whole(None, is_continued=True)
        return super().generate(*args, **kwargs)


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
