"""The numbers of an attention layer, of each kind that we build."""

from dataclasses import dataclass
from typing import Literal

from moe_zoo.spec.errors import RecipeError
from moe_zoo.spec.numbers import STRICT, check_one_of, check_positive


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
        check_positive(self, "factor")
        check_one_of(self, "kind", ("linear", "llama3", "yarn"))
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
        check_positive(self, "num_heads", "num_kv_heads", "head_dim", "rope_theta", "value_scale")
        optional = ("window", "chunk", "scale", "value_dim")
        check_positive(self, "temperature_floor", *(name for name in optional if getattr(self, name) is not None))
        check_one_of(self, "qk_norm_over", ("head", "all"))
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
        check_positive(self, "num_heads", "kv_rank", "nope_dim", "rope_dim", "value_dim", "rope_theta")
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
        check_positive(self, "num_heads", "head_dim")
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
