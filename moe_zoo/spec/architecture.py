"""Architecture: every number that defines a model. It is saved with the weights and names no device.

Plain dataclasses, not pydantic: the file travels with exported models, whose readers have transformers alone.
"""

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any, Literal

from moe_zoo.spec.attention import AttentionSpec, LatentAttentionSpec, RelativeAttentionSpec
from moe_zoo.spec.errors import RecipeError, did_you_mean
from moe_zoo.spec.feed_forward import FeedForwardSpec, MoESpec
from moe_zoo.spec.numbers import STRICT, check_one_of, check_positive

SCALES = ("embedding_scale", "residual_scale", "logit_divisor")


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """The encoder of an encoder-decoder: blocks that see all of their text, read by every block behind them."""

    num_layers: int
    first_layer: int | None = None  # first sparse layer; null: as model.moe says of the decoder
    every: int | None = None  # the same for the stride
    # Of both halves: a dense feed-forward with a norm of its own behind each sparse one (ST-MoE, arXiv:2202.08906).
    extra_ffn: bool = False

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        check_positive(self, "num_layers")
        if (self.first_layer is not None and self.first_layer < 0) or (self.every is not None and self.every < 1):
            raise RecipeError(
                f"encoder: first_layer {self.first_layer}, every {self.every}; layers count from 0, and a stride is at "
                f"least 1; raise it, or write null for what model.moe says"
            )


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder of ``num_layers`` blocks; block i is sparse where ``is_sparse(i)``.

    Blocks may have one of two kinds of attention (``attention_of``); a hybrid's linear attention would be one of them.
    With an ``encoder`` its blocks are the first ``encoder.num_layers`` of the ``num_layers``, the decoder's the others.
    ``moe.first_layer`` and ``moe.every`` count in each half by itself, ``moe.dense_layers`` through both.
    With ``shortcut`` a block is two attentions and two dense feed-forwards, and a sparse one beside all that follows the
    first attention, whose output is added at the end of the block (arXiv:2404.05019; LongCat, arXiv:2509.01322).
    """

    vocab_size: int
    d_model: int
    num_layers: int
    attention: AttentionSpec | LatentAttentionSpec | RelativeAttentionSpec
    feed_forward: FeedForwardSpec  # of the dense layers
    moe: MoESpec | None = None
    shortcut: bool = False
    local_attention: AttentionSpec | None = None  # of the blocks ``local_layers``
    local_layers: tuple[int, ...] = ()
    embedding_scale: float = 1.0  # multiplies what is looked up (Granite)
    residual_scale: float = 1.0  # multiplies what attention and feed-forward add
    logit_divisor: float = 1.0
    head_bias: bool = False
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    init_std: float = 0.02  # of every matrix; those that write to the residual stream get it over sqrt(their number)
    encoder: EncoderSpec | None = None  # null: decoder-only

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        check_positive(self, "vocab_size", "d_model", "num_layers", "norm_eps", "init_std")
        check_positive(self, "embedding_scale", "residual_scale", "logit_divisor")
        check_one_of(self, "norm", ("rmsnorm", "layernorm"))
        self._check_local_layers()
        self._check_encoder()
        if self.moe and not self.sparse_layers:
            raise RecipeError(
                f"moe.first_layer: {self.moe.first_layer}; the model has layers 0 to {self.num_layers - 1}; "
                f"lower it, or set moe to null"
            )
        is_plain = self.moe and len(self.sparse_layers) == self.num_layers and self.local_attention is None
        if self.shortcut and not (is_plain and self.residual_scale == 1.0):
            raise RecipeError(
                "model.shortcut: true; is built where every block has experts, one kind of attention and residual_scale 1; "
                "drop moe.first_layer, moe.every, moe.dense_layers, local_attention or residual_scale, or set it to false"
            )

    def _check_encoder(self) -> None:
        encoder, is_relative = self.encoder, isinstance(self.attention, RelativeAttentionSpec)
        if is_relative != (encoder is not None):
            remedy = "describe model.encoder" if is_relative else "give it num_heads, head_dim, buckets, max_distance"
            raise RecipeError(
                f"model.attention: {type(self.attention).__name__}; an encoder-decoder has relative positions, a decoder "
                f"rotary ones; {remedy}, or set model.encoder to null"
            )
        if encoder is not None and encoder.num_layers >= self.num_layers:
            raise RecipeError(
                f"model.encoder.num_layers: {encoder.num_layers}; model.num_layers = {self.num_layers} counts both "
                f"halves; lower it, or raise that"
            )
        plain = {name: getattr(self, name) for name in ("local_attention", "head_bias", *SCALES)}
        for name, value in plain.items() if encoder is not None else ():
            if value not in (None, False, 1.0):
                raise RecipeError(f"model.{name}: {value}; an encoder-decoder has none; drop it, or model.encoder")
        if encoder is not None and self.experts_choose:
            raise RecipeError(
                "router.choice: expert; an encoder-decoder takes the paper's choice alone, that of tokens; set it to token"
            )

    @property
    def num_encoder_layers(self) -> int:
        """Blocks of the encoder, which come first; 0 in a decoder-only model."""
        return self.encoder.num_layers if self.encoder else 0

    def has_extra_ffn(self, layer: int) -> bool:
        """Whether a dense feed-forward stands behind the experts of block ``layer``."""
        return self.encoder is not None and self.encoder.extra_ffn and self.is_sparse(layer)

    def _check_local_layers(self) -> None:
        if (self.local_attention is None) != (not self.local_layers):
            raise RecipeError(
                f"model.local_layers: {list(self.local_layers)}; names the blocks of local_attention, which is "
                f"{'not given' if self.local_attention is None else 'given'}; set both or none"
            )
        if beyond := [layer for layer in self.local_layers if not 0 <= layer < self.num_layers]:
            raise RecipeError(
                f"model.local_layers: {beyond[0]}; the model has layers 0 to {self.num_layers - 1}; drop it"
            )

    def attention_of(self, layer: int) -> AttentionSpec | LatentAttentionSpec | RelativeAttentionSpec:
        """The attention of block ``layer``."""
        return self.local_attention if self.local_attention and layer in self.local_layers else self.attention

    @property
    def attentions(self) -> dict[str, AttentionSpec | LatentAttentionSpec | RelativeAttentionSpec]:
        """The kinds that blocks have, by the key that holds them."""
        kinds = {"attention": self.attention, "local_attention": self.local_attention}
        return {key: spec for key, spec in kinds.items() if spec is not None}

    @property
    def attentions_per_block(self) -> int:
        """Each with the norms before it and before the feed-forward behind it."""
        return 2 if self.shortcut else 1

    @property
    def num_dense(self) -> int:
        """Dense feed-forwards of the model, shared experts aside."""
        return 2 * self.num_layers if self.shortcut else self.num_layers - len(self.sparse_layers)

    @property
    def residual_writes(self) -> int:
        """Matrices that write to the residual stream, stacks of experts counted once."""
        return (5 if self.shortcut else 2) * self.num_layers

    @property
    def has_output_biases(self) -> bool:
        """Whether a layer that tensor parallelism cuts adds a bias to its output."""
        dense = (self.feed_forward, *((self.moe.shared,) if self.moe and self.moe.shared else ()))
        return any(spec.has_out_bias for spec in self.attentions.values()) or any(spec.bias for spec in dense)

    def is_sparse(self, layer: int) -> bool:
        """Whether block ``layer`` (from 0) has experts."""
        moe, encoder = self.moe, self.encoder
        if moe is None or layer in moe.dense_layers:
            return False
        first, every = moe.first_layer, moe.every
        if encoder is not None and layer < encoder.num_layers:
            first = first if encoder.first_layer is None else encoder.first_layer
            every = every if encoder.every is None else encoder.every
        elif encoder is not None:
            layer -= encoder.num_layers
        return layer >= first and (layer - first) % every == 0

    @property
    def sparse_layers(self) -> list[int]:
        """Indices of the blocks that have experts."""
        return [layer for layer in range(self.num_layers) if self.is_sparse(layer)]

    @property
    def num_experts(self) -> int:
        """Experts per sparse layer; 0 in a dense model."""
        return self.moe.router.num_experts if self.moe else 0

    @property
    def num_scored(self) -> int:
        """Experts per sparse layer that tokens choose from, those without weights too; 0 in a dense model."""
        return self.moe.router.num_scored if self.moe else 0

    @property
    def experts_choose(self) -> bool:
        """Whether experts choose their tokens, so that a route depends on the whole row."""
        return self.moe is not None and self.moe.router.choice == "expert"

    def to_dict(self) -> dict[str, Any]:
        """Plain nested values, as they stand in a recipe or a ``config.json``."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Architecture":
        """The inverse of ``to_dict``. Raises ``RecipeError`` on an unknown or missing key, or an impossible number."""
        built: Architecture = _build(cls, values, "model")
        return built


def _build(cls: type, values: dict[str, Any], where: str) -> Any:
    kinds = typing.get_type_hints(cls)
    for key in values:
        if key not in kinds:
            raise RecipeError(f"{where}.{key}: unknown key; {did_you_mean(key, kinds)}")
    made = {}
    for field in dataclasses.fields(cls):
        if field.name not in values:
            if field.default is dataclasses.MISSING:
                raise RecipeError(f"{where}.{field.name}: missing; every model needs it; add it")
            continue
        value = values[field.name]
        if (nested := _nested(kinds[field.name], value)) and value is not None:
            made[field.name] = _build(nested, value, f"{where}.{field.name}")
        else:
            made[field.name] = tuple(value) if isinstance(value, list) else value
    return cls(**made)


def _nested(kind: Any, values: Any) -> type | None:
    """The dataclass that a value is of: of several, the one that has the most of its keys, and lacks the fewest."""
    classes = [k for k in (kind, *typing.get_args(kind)) if isinstance(k, type) and dataclasses.is_dataclass(k)]
    keys = set(values) if isinstance(values, dict) else set()

    def fit(cls: type) -> tuple[int, int]:
        needed = {field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING}
        return len(typing.get_type_hints(cls).keys() & keys), -len(needed - keys)

    return max(classes, key=fit, default=None)
