"""Architecture: every number that defines a model. It is saved with the weights and names no device.

Plain dataclasses, not pydantic: the file travels with exported models, whose readers have transformers alone.
"""

import dataclasses
import math
import typing
from dataclasses import dataclass
from typing import Any, Literal

from moe_zoo.spec.errors import RecipeError, did_you_mean

SCALES = ("embedding_scale", "residual_scale", "logit_divisor")
STRICT = {"extra": "forbid"}  # read by pydantic when a recipe holds these classes


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Rotary frequencies stretched to rows longer than the model was first trained on.

    ``linear`` divides all by ``factor`` (arXiv:2306.15595); ``llama3`` only those of long waves, with a ramp between
    ``low_freq_factor`` and ``high_freq_factor`` turns per ``original_length``; ``yarn`` ramps between ``beta_slow`` and
    ``beta_fast`` turns and scales queries and keys by ``attention_factor`` (arXiv:2309.00071).
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_length: int = 0  # of llama3 and yarn
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # null: 0.1 ln(factor) + 1
    score_factor: float = 1.0  # of the scores beside it (DeepSeek's mscale_all_dim, squared)
    truncate: bool = True  # the ramp begins and ends at whole dimensions

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        _positive(self, "factor")
        _one_of(self, "kind", ("linear", "llama3", "yarn"))
        if self.kind != "linear" and self.original_length <= 0:
            raise RecipeError(
                f"rope_scaling.original_length: {self.original_length}; {self.kind} counts turns per the length that the "
                f"model was first trained on; set it"
            )


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention with rotary positions: ``num_heads / num_kv_heads`` queries share a key."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None  # leading part of each head that is rotated; null: all of it; 0: none
    rope_interleaved: bool = False  # pairs (0, 1), (2, 3) ... in place of halves (ERNIE)
    qk_norm: bool = False  # RMSNorm of queries and keys
    qk_norm_over: Literal["head", "all"] = "head"  # each head by itself (Qwen3), or all of them together (OLMoE)
    bias: bool = False  # of query, key and value
    out_bias: bool = False  # of the output
    qk_unit_norm: bool = False  # RMSNorm of queries and keys without gains, after the rotation (Llama 4)
    window: int | None = None  # keys that a query sees, its own among them; null: all before it (arXiv:2310.06825)
    chunk: int | None = None  # a query sees its own chunk of a document alone, cut every so many tokens (Llama 4)
    # Queries far into a document times 1 + temperature * ln(1 + floor((position + 1) / temperature_floor)).
    temperature: float = 0.0  # Source: arXiv:2501.19399, as in transformers.models.llama4
    temperature_floor: int = 8192
    sinks: bool = False  # a learned score per head that takes its share of the softmax and gives nothing (gpt-oss)
    scale: float | None = None  # of the scores; null: 1 / sqrt(head_dim)
    value_dim: int | None = None  # width of a value; null: head_dim
    value_scale: float = 1.0  # of the values (MiMo)

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        _positive(self, "num_heads", "num_kv_heads", "head_dim", "rope_theta", "value_scale")
        optional = ("window", "chunk", "scale", "value_dim")
        _positive(self, "temperature_floor", *(name for name in optional if getattr(self, name) is not None))
        _one_of(self, "qk_norm_over", ("head", "all"))
        if self.num_heads % self.num_kv_heads:
            raise RecipeError(
                f"attention.num_kv_heads: {self.num_kv_heads}; must divide num_heads = {self.num_heads}; "
                f"{self.num_heads} keeps every head its own keys"
            )
        if self.head_dim % 2:
            raise RecipeError(f"attention.head_dim: {self.head_dim}; rotary pairs need an even number; change it")
        if self.rotary_dim is not None and (self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim):
            raise RecipeError(
                f"attention.rotary_dim: {self.rotary_dim}; must be even and at most head_dim = {self.head_dim}; "
                f"null rotates all of it"
            )

    @property
    def has_out_bias(self) -> bool:
        """Whether the output has a bias."""
        return self.out_bias

    @property
    def value_width(self) -> int:
        """Width of a value."""
        return self.value_dim or self.head_dim

    @property
    def rotary_width(self) -> int:
        """Entries of a head that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec:
    """Multi-head latent attention: keys and values of all heads come from one narrow vector per token.

    A head is ``nope_dim`` entries that are not rotated and ``rope_dim`` that are, of which the keys' are shared by all
    heads. Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """

    num_heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None = None  # null: queries come straight from the hidden state
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rope_interleaved: bool = True  # pairs (0, 1), (2, 3) ... as DeepSeek's weights have them
    norm_eps: float = 1e-6  # of the two narrow vectors
    bias: bool = False  # of the matrices that make narrow vectors, and of the output
    scales_ranks: bool = False  # the narrow vectors times sqrt(d_model / width) (LongCat)

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        _positive(self, "num_heads", "kv_rank", "nope_dim", "rope_dim", "value_dim", "rope_theta")
        if self.rope_dim % 2:
            raise RecipeError(f"attention.rope_dim: {self.rope_dim}; rotary pairs need an even number; change it")

    @property
    def num_kv_heads(self) -> int:
        """Every head has keys of its own."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """Width of a query or a key."""
        return self.nope_dim + self.rope_dim

    @property
    def has_out_bias(self) -> bool:
        """Whether the output has a bias."""
        return self.bias

    @property
    def value_width(self) -> int:
        """Width of a value."""
        return self.value_dim

    @property
    def rotary_width(self) -> int:
        """Entries of a head that are rotated."""
        return self.rope_dim


@dataclass(frozen=True, kw_only=True)
class RelativeAttentionSpec:
    """Attention of an encoder-decoder: every head has keys of its own, and a learned bias for each bucket of distances.

    Scores are not scaled: initial queries are narrower by sqrt(head_dim) instead. Source: T5, arXiv:1910.10683,
    section 2.1.
    """

    num_heads: int
    head_dim: int
    buckets: int = 32  # of distances between a query and a key; half of them exact, the others ever wider
    max_distance: int = 128  # from here on all are alike

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        _positive(self, "num_heads", "head_dim")
        if self.buckets < 4 or self.buckets % 2:  # an encoder gives half of them to each direction
            raise RecipeError(f"attention.buckets: {self.buckets}; must be even and at least 4; T5 uses 32")
        if self.max_distance <= self.buckets // 2:
            raise RecipeError(
                f"attention.max_distance: {self.max_distance}; must be above buckets / 2 = {self.buckets // 2}, up to "
                f"which distances have buckets of their own; T5 uses 128"
            )

    @property
    def num_kv_heads(self) -> int:
        """Every head has keys of its own."""
        return self.num_heads

    @property
    def has_out_bias(self) -> bool:
        """It has no biases but those of distances."""
        return False

    @property
    def value_width(self) -> int:
        """Width of a value."""
        return self.head_dim


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
        _positive(self, "num_layers")
        if (self.first_layer is not None and self.first_layer < 0) or (self.every is not None and self.every < 1):
            raise RecipeError(
                f"encoder: first_layer {self.first_layer}, every {self.every}; layers count from 0, and a stride is at "
                f"least 1; raise it, or write null for what model.moe says"
            )


@dataclass(frozen=True, kw_only=True)
class FeedForwardSpec:
    """One FFN, dense or one expert: ``activation(x W_up) W_down``, or gated, ``(act(x W_gate) * x W_up) W_down``."""

    d_ff: int
    activation: Literal["relu", "gelu", "silu", "quick_gelu"] = "silu"  # the last: x sigmoid(1.702 x)
    gated: bool = True  # silu + gated = SwiGLU, gelu + gated = GEGLU, relu ungated = Switch
    bias: bool = False  # of all its matrices
    limit: float | None = None  # the gate is cut off above it, the up half above and below (gpt-oss)
    up_offset: float = 0.0  # added to the up half after that

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        _positive(self, "d_ff", *(("limit",) if self.limit is not None else ()))
        _one_of(self, "activation", ("relu", "gelu", "silu", "quick_gelu"))
        for name in ("limit", "up_offset"):
            if getattr(self, name) and not self.gated:
                raise RecipeError(
                    f"feed_forward.{name}: {getattr(self, name)}; belongs to a gated one; drop it, or set gated to true"
                )


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How tokens and experts find each other.

    ``softmax``, ``top_k = 1``, a capacity factor and jitter make the Switch router (arXiv:2101.03961);
    ``sigmoid`` with ``selection_bias``, ``normalize`` and groups that of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).
    With ``choice = "expert"`` each expert takes its best tokens of every row, ``top_k`` per token on average
    (arXiv:2202.09368): always balanced, but a token's route depends on later ones, so such a model cannot generate.

    ``zero_experts`` more are scored and chosen like all others, and give back what they get: no weights, no capacity, no
    travel (LongCat-Flash, arXiv:2509.01322). Balance is even over both kinds, so a token meets ``top_k * num_experts /
    num_scored`` with weights on average; as there, ``balance.method = bias`` moves the bias of these alone.
    """

    num_experts: int  # that have weights
    top_k: int = 1
    zero_experts: int = 0
    # sparsemixer: of each choice, a softmax over the experts that are not far behind it (arXiv:2409.12136, section 2.1)
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    tolerance: float = 0.0  # of sparsemixer: how far behind, as a share
    scales_input: bool = False  # the weight multiplies what an expert is given, not what it gives (Llama 4)
    normalize: bool = False  # chosen weights sum to one
    scale: float = 1.0  # multiplies the weights
    bias: bool = False  # of the logits, trained
    selection_bias: bool = False  # added to the scores for the choice alone; moved by balance.method = bias
    jitter: float = 0.0  # router input times uniform(1 - jitter, 1 + jitter) in training
    capacity_factor: float | None = None  # slots an expert takes per sequence, over the mean; None never drops
    eval_capacity_factor: float | None = None
    num_groups: int = 1  # equal runs of experts, of which a token chooses within its best
    groups_per_token: int = 1
    group_score: Literal["max", "top2"] = "max"  # of a group: its best expert's, or the sum of its two best
    # Who chooses. For experts a null capacity_factor means 1, and a null eval_capacity_factor the same as in training.
    choice: Literal["token", "expert"] = "token"

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        _positive(self, "num_experts", "top_k", "scale")
        _one_of(self, "score", ("softmax", "sigmoid", "sparsemixer"))
        if self.zero_experts < 0:
            raise RecipeError(f"router.zero_experts: {self.zero_experts}; must be at least 0; 0 has none")
        if self.top_k > self.num_scored:
            raise RecipeError(
                f"router.top_k: {self.top_k}; a token cannot choose more than num_experts = {self.num_scored}; lower it"
            )
        if not 0 <= self.jitter < 1:
            raise RecipeError(f"router.jitter: {self.jitter}; must be at least 0 and below 1; Switch uses 0.01")
        for name in ("capacity_factor", "eval_capacity_factor"):
            factor = getattr(self, name)
            if factor is not None and factor <= 0:
                raise RecipeError(f"router.{name}: {factor}; must be positive; null never drops a token")
        if self.scales_input and self.top_k > 1:
            raise RecipeError(
                f"router.scales_input: true; each of top_k = {self.top_k} choices would want an input of its own; set "
                f"top_k to 1"
            )
        self._check_groups()
        self._check_choice()
        plain = (self.choice, self.num_groups, self.scales_input) == ("token", 1, False)
        if self.zero_experts and not (plain and self.score != "sparsemixer"):
            raise RecipeError(
                f"router.zero_experts: {self.zero_experts}; are built where tokens choose among all experts by softmax or "
                f"sigmoid and weights scale outputs; set it to 0, or drop choice, num_groups, scales_input or sparsemixer"
            )
        if self.score == "sparsemixer" and (self.choice, self.num_groups, self.selection_bias) != ("token", 1, False):
            raise RecipeError(
                "router.score: sparsemixer; knows no groups, no selection_bias and no choice by experts; set score to softmax"
            )

    def _check_groups(self) -> None:
        _positive(self, "num_groups", "groups_per_token")
        _one_of(self, "group_score", ("max", "top2"))
        if self.num_experts % self.num_groups:
            raise RecipeError(
                f"router.num_groups: {self.num_groups}; must divide num_experts = {self.num_experts}; try "
                f"{math.gcd(self.num_groups, self.num_experts)}"
            )
        if self.groups_per_token > self.num_groups:
            raise RecipeError(
                f"router.groups_per_token: {self.groups_per_token}; there are num_groups = {self.num_groups}; lower it"
            )
        within_reach = self.groups_per_token * self.num_scored // self.num_groups
        if self.top_k > within_reach:
            raise RecipeError(
                f"router.top_k: {self.top_k}; the groups_per_token = {self.groups_per_token} groups of a token hold "
                f"{within_reach} experts; lower it, or raise groups_per_token"
            )

    def _check_choice(self) -> None:
        _one_of(self, "choice", ("token", "expert"))
        if self.choice == "token":
            return
        for name, plain in (("selection_bias", False), ("num_groups", 1)):
            if getattr(self, name) != plain:
                raise RecipeError(
                    f"router.{name}: {str(getattr(self, name)).lower()}; says how tokens choose, here experts do; "
                    f"set it to {str(plain).lower()}, or choice to token"
                )

    @property
    def num_scored(self) -> int:
        """Experts among which a token chooses: those with weights and those without."""
        return self.num_experts + self.zero_experts

    def slots_per_token(self, seq_len: int) -> float:
        """Choices per token of a row: ``top_k``, or where experts choose what they take in all, rounded up for each."""
        if self.choice == "token":
            return self.top_k
        capacity = math.ceil((self.capacity_factor or 1.0) * seq_len * self.top_k / self.num_experts)
        return self.num_experts * capacity / seq_len


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """The sparse feed-forward of a model, and the layers that have one."""

    router: RouterSpec
    experts: FeedForwardSpec
    shared: FeedForwardSpec | None = None  # an expert that every token visits
    shared_gate: bool = False  # its output times sigmoid(w x) (Qwen2-MoE)
    dense_layers: tuple[int, ...] = ()  # layers that have no experts although their turn has come
    first_layer: int = 0  # first sparse layer
    every: int = 1  # sparse layers are first_layer, first_layer + every, ...

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        _positive(self, "every")
        if self.shared_gate and self.shared is None:
            raise RecipeError(
                "moe.shared_gate: true; there is no shared expert to gate; describe moe.shared, or drop it"
            )
        if self.first_layer < 0:
            raise RecipeError(f"moe.first_layer: {self.first_layer}; layers count from 0; raise it")


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
        _positive(self, "vocab_size", "d_model", "num_layers", "norm_eps", "init_std")
        _positive(self, "embedding_scale", "residual_scale", "logit_divisor")
        _one_of(self, "norm", ("rmsnorm", "layernorm"))
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


def _positive(spec: Any, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if not value > 0:
            raise RecipeError(f"model {name}: {value}; must be positive; raise it")


def _one_of(spec: Any, name: str, known: tuple[str, ...]) -> None:
    value = getattr(spec, name)
    if value not in known:
        raise RecipeError(f"model {name}: {value!r}; {did_you_mean(str(value), known)}")
