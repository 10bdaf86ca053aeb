"""The Hugging Face configuration of our own decoders: an Architecture, and the names that generation asks for."""

from typing import Any

from transformers import PretrainedConfig

from moe_zoo.spec.architecture import Architecture


class MoeZooConfig(PretrainedConfig):
    """``architecture`` holds every number; the usual attributes are read from it.

    ``upstream`` is the configuration that the model was loaded with, where it is of another's family: it is saved so.
    """

    model_type = "moe_zoo"
    has_no_defaults_at_init = True

    def __init__(
        self, architecture: dict[str, Any] | None = None, upstream: dict[str, Any] | None = None, **kwargs: Any
    ):
        self.architecture, self.upstream = architecture, upstream
        if architecture is not None:
            spec = self.to_architecture()
            self.vocab_size, self.hidden_size = spec.vocab_size, spec.d_model
            # A cache has a layer for each attention of the decoder on itself.
            self.num_hidden_layers = spec.attentions_per_block * (spec.num_layers - spec.num_encoder_layers)
            self.head_dim = spec.attention.head_dim
            self.num_attention_heads = spec.attention.num_heads
            self.num_key_value_heads = spec.attention.num_kv_heads
            self.num_experts = spec.num_experts
            kwargs["tie_word_embeddings"] = spec.tie_embeddings
            kwargs["is_encoder_decoder"] = spec.encoder is not None
        super().__init__(**kwargs)

    def to_architecture(self) -> Architecture:
        """The numbers, checked."""
        return Architecture.from_dict(self.architecture)
