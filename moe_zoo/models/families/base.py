"""What a family is: a way to read another's configuration, and the names of its weights. No forward code.

A rule says where one tensor of a file stands in ours; loading and saving read the same rules in two directions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from moe_zoo.spec.architecture import Architecture, AttentionSpec, FeedForwardSpec, RopeScaling
from moe_zoo.spec.errors import CheckpointError


class Rule(NamedTuple):
    """``theirs`` is block ``block`` of ``blocks`` of the last dimension of ``ours``, perhaps transposed.

    Both names hold ``{layer}``, or each its own number; with ``{expert}`` in theirs, ours is a stack of which it is one entry.
    """

    theirs: str
    ours: str
    block: int = 0
    blocks: int = 1
    is_transposed: bool = False


@dataclass(frozen=True)
class Family:
    """Models of one ``model_type`` of transformers."""

    model_type: str
    read: Callable[[PretrainedConfig], Architecture]
    write: Callable[[Architecture], dict[str, Any]]  # the numbers that an Architecture holds, by their names there
    rules: tuple[Rule, ...]
    more_rules: Callable[[Architecture], tuple[Rule, ...]] = lambda _: ()  # those that depend on the numbers
    aliases: Callable[[Architecture], dict[str, str]] = lambda _: {}  # copies that its files may hold -> originals

    def rules_of(self, architecture: Architecture) -> tuple[Rule, ...]:
        """All of them, for a model of these numbers."""
        return self.rules + self.more_rules(architecture)


LAYER = "model.layers.{layer}."
BLOCK = "layers.{layer}."
LLAMA_RULES = (
    Rule("model.embed_tokens.weight", "embed.weight"),
    Rule("model.norm.weight", "norm.weight"),
    Rule("lm_head.weight", "head.weight"),
    Rule(LAYER + "input_layernorm.weight", BLOCK + "attention_norm.weight"),
    Rule(LAYER + "post_attention_layernorm.weight", BLOCK + "feed_forward_norm.weight"),
    *(
        Rule(f"{LAYER}self_attn.{theirs}_proj.{part}", f"{BLOCK}attention.{ours}.{part}")
        for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out"))
        for part in ("weight", "bias")
    ),
    Rule(LAYER + "self_attn.q_norm.weight", BLOCK + "attention.query_norm.weight"),
    Rule(LAYER + "self_attn.k_norm.weight", BLOCK + "attention.key_norm.weight"),
    *(Rule(f"{LAYER}mlp.{part}_proj.weight", f"{BLOCK}feed_forward.{part}.weight") for part in ("gate", "up", "down")),
)


def moe_rules(
    parent: str = "mlp",
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    shared: str | None = None,
) -> tuple[Rule, ...]:
    """Router, experts one by one, and the expert that every token visits."""
    theirs, ours = f"{LAYER}{parent}.", BLOCK + "feed_forward."
    everybody = (
        Rule(f"{theirs}{shared}.{part}_proj.weight", f"{ours}shared.{part}.weight") for part in ("gate", "up", "down")
    )
    return (
        Rule(theirs + "gate.weight", ours + "router.weight"),
        Rule(f"{theirs}experts.{{expert}}.{gate}.weight", ours + "experts.w_up", 0, 2, is_transposed=True),
        Rule(f"{theirs}experts.{{expert}}.{up}.weight", ours + "experts.w_up", 1, 2, is_transposed=True),
        Rule(f"{theirs}experts.{{expert}}.{down}.weight", ours + "experts.w_down", is_transposed=True),
        *(everybody if shared else ()),
    )


def swiglu(d_ff: int) -> FeedForwardSpec:
    """The feed-forward of nearly every family."""
    return FeedForwardSpec(d_ff=d_ff, activation="silu", gated=True)


def common(config: PretrainedConfig) -> dict[str, Any]:
    """Fields of an Architecture that Llama-shaped configurations name alike."""
    if config.hidden_act != "silu":
        raise refused(config, "hidden_act", config.hidden_act, "silu")
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "norm_eps": config.rms_norm_eps,
        "tie_embeddings": bool(config.tie_word_embeddings),
        "init_std": config.initializer_range,
    }


def common_numbers(architecture: Architecture) -> dict[str, Any]:
    """The inverse of ``common``."""
    return {
        "hidden_act": "silu",
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.d_model,
        "num_hidden_layers": architecture.num_layers,
        "rms_norm_eps": architecture.norm_eps,
        "tie_word_embeddings": architecture.tie_embeddings,
        "initializer_range": architecture.init_std,
    }


def common_back(architecture: Architecture) -> dict[str, Any]:
    """The inverse of ``common`` and of ``heads``."""
    spec = architecture.attention
    return common_numbers(architecture) | {
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rope_parameters": rope_back(architecture),
    }


def heads(config: PretrainedConfig) -> dict[str, Any]:
    """Fields of an AttentionSpec: sizes and rotation."""
    rope = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = rope.get("partial_rotary_factor", 1.0)
    return {
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads or config.num_attention_heads,
        "head_dim": head_dim,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling_of(config, rope),
        "rotary_dim": int(head_dim * share) if share != 1.0 else None,
    }


def rope_back(architecture: Architecture) -> dict[str, Any]:
    """``rope_parameters`` of a configuration."""
    spec = architecture.attention
    values: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if isinstance(spec, AttentionSpec) and spec.rotary_dim is not None:
        values["partial_rotary_factor"] = spec.rotary_dim / spec.head_dim
    scaling = spec.rope_scaling
    if scaling is None:
        return values
    values |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        values["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "llama3":
        values |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        values |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
        if scaling.attention_factor is not None:
            values["attention_factor"] = scaling.attention_factor
        if scaling.score_factor != 1.0:  # (0.1 m ln(factor) + 1)^2, solved for m
            values["mscale_all_dim"] = (math.sqrt(scaling.score_factor) - 1) / (0.1 * math.log(scaling.factor))
    return values


def no_window(config: PretrainedConfig) -> None:
    """Refuse a window that would hide keys: our attention has none."""
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        raise refused(config, "sliding_window", window, "null")


def dense_layers(config: PretrainedConfig) -> tuple[int, ...]:
    """Qwen's ``mlp_only_layers``."""
    return tuple(config.mlp_only_layers or ())


def refused(config: PretrainedConfig, key: str, value: Any, known: str) -> CheckpointError:
    """The error for a configuration whose model we cannot build."""
    return CheckpointError(
        f"config.json of {config.model_type}: {key}: {value}; moe-zoo builds this family with {known}; choose another model"
    )


def scaling_of(config: PretrainedConfig, rope: dict[str, Any]) -> RopeScaling | None:
    """How frequencies are stretched; None: they are not."""
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise refused(config, "rope_parameters.rope_type", kind, "default, linear, llama3 or yarn")
    names = {"low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "truncate"}
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    chosen = {name: rope[name] for name in names & rope.keys() if rope[name] is not None}
    return RopeScaling(kind=kind, factor=rope["factor"], original_length=original, **chosen)
