"""Our encoder-decoder in Hugging Face dress: from_pretrained, save_pretrained, generate.

Letters: B batch, S tokens of the decoder that are new, K keys.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from moe_zoo.models.causal_lm import MoeZooForCausalLM
from moe_zoo.models.config import MoeZooConfig
from moe_zoo.models.pretrained import MoeZooPreTrainedModel, token_loss
from moe_zoo.models.switch import SparseEncoderDecoder
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.errors import MoeZooError


class MoeZooForSeq2SeqLM(MoeZooPreTrainedModel, GenerationMixin):
    """A SparseEncoderDecoder as ``self.model``; the names of its parameters are those of training, behind ``model.``."""

    auto_name = "AutoModelForSeq2SeqLM"
    _no_split_modules: ClassVar[list[str]] = ["RelativeBlock"]

    def __init__(self, config: MoeZooConfig):
        super().__init__(config)
        self.model = SparseEncoderDecoder(config.to_architecture())
        self._encoder = [_Encoder(self.model)]  # a list: its weights are those of ``model``, and not saved twice
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Logits of the decoder's tokens; with ``labels`` the mean token loss of the decoder that reads them shifted.

        Over ``num_items_in_batch`` tokens, where a trainer adds up the losses of several batches. The loss holds no router
        losses: train with a recipe, whose balance is exact in every layout.
        """
        if encoder_outputs is None:
            encoder_outputs = self.get_encoder()(input_ids=input_ids, attention_mask=attention_mask)
        memory = encoder_outputs[0]
        if decoder_input_ids is None and labels is not None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if self.training and self.is_activation_checkpointing:
            use_cache = False  # a second forward would add the same keys again
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(), DynamicCache())
        logits = self.model.decode(
            decoder_input_ids,
            memory,
            key_bias=padding_bias(decoder_attention_mask, memory.dtype),
            memory_bias=padding_bias(attention_mask, memory.dtype),
            cache=past_key_values,
            num_past=past_key_values.get_seq_length() if past_key_values is not None else 0,
        )
        loss = None
        if labels is not None:
            loss = token_loss(logits, labels, num_items_in_batch)
        return Seq2SeqLMOutput(loss, logits, past_key_values, encoder_last_hidden_state=memory)

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """What ``generate`` calls once."""
        return self._encoder[0]

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The decoder reads a start token, then each label but the last; ignored ones are padding. As T5."""
        start, pad = (getattr(self.config, f"{name}_token_id", None) for name in ("decoder_start", "pad"))
        start = pad if start is None else start
        if start is None:
            raise MoeZooError(
                "config.decoder_start_token_id: null; a decoder begins with it; set it, T5 and Switch use pad_token_id = 0"
            )
        shifted = F.pad(labels[:, :-1], (1, 0), value=start)
        return shifted.masked_fill(shifted == -100, start if pad is None else pad)


class _Encoder(nn.Module):
    """The encoder's half of a model, as ``generate`` asks for it."""

    main_input_name = "input_ids"

    def __init__(self, model: SparseEncoderDecoder):
        super().__init__()
        self.unregistered = [model]

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> BaseModelOutput:
        (model,) = self.unregistered
        return BaseModelOutput(model.encode(input_ids, padding_bias(attention_mask, model.embed.weight.dtype)))


def padding_bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """(B, K), 1 where there is a token -> (B, 1, 1, K) to be added to scores. None: nothing to hide.

    The least finite number, not minus infinity: a query that sees padding alone must not become NaN.
    """
    if mask is None or bool(mask.all()):
        return None
    return (1 - mask[:, None, None, :].to(dtype)) * torch.finfo(dtype).min


def model_class(architecture: Architecture) -> type[MoeZooForCausalLM] | type[MoeZooForSeq2SeqLM]:
    """The class that holds such a model."""
    return MoeZooForSeq2SeqLM if architecture.encoder else MoeZooForCausalLM
