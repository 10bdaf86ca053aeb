"""What a family is: a way to read another's configuration, and the names of its weights. No forward code.

A rule says where one tensor of a file stands in ours; loading and saving read the same rules in two directions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import AttentionSpec, LatentAttentionSpec, RopeScaling
from moe_zoo.spec.errors import CheckpointError
from moe_zoo.spec.feed_forward import FeedForwardSpec, MoESpec, RouterSpec


class Rule(NamedTuple):
    """``theirs`` is block ``block`` of ``blocks`` of the last dimension of ``ours``, perhaps in another shape.

    Both names hold ``{layer}``, or each its own number; with ``{expert}`` in theirs, ours is a stack of which it is one
    entry.
    """

    theirs: str
    ours: str
    block: int = 0
    blocks: int = 1
    is_transposed: bool = False  # the last two dimensions
    is_stacked: bool = False  # theirs holds all experts too
    is_interleaved: bool = False  # the two halves of ours alternate in theirs
    has_one_row: bool = False  # theirs begins with a dimension of one
    rows: range | None = None  # of theirs: several of ours stand behind each other in it

    @property
    def is_only_transposed(self) -> bool:
        """Whether theirs is a matrix of ours, turned, and nothing else."""
        return self.is_transposed and not (self.is_stacked or self.is_interleaved or self.has_one_row or self.rows)

    def as_ours(self, values: Tensor) -> Tensor:
        """A block of ours from theirs."""
        values = values[0] if self.has_one_row else values
        values = values.transpose(-1, -2) if self.is_transposed else values
        return torch.cat((values[..., 0::2], values[..., 1::2]), dim=-1) if self.is_interleaved else values

    def as_theirs(self, values: Tensor) -> Tensor:
        """Theirs from a block of ours, or of a stack of ours."""
        values = torch.stack(values.chunk(2, dim=-1), dim=-1).flatten(-2) if self.is_interleaved else values
        values = values.transpose(-1, -2) if self.is_transposed else values
        return values[None] if self.has_one_row else values


@dataclass(frozen=True)
class Family:
    """Models of one ``model_type`` of transformers."""

    model_type: str
    read: Callable[[PretrainedConfig], Architecture]
    write: Callable[[Architecture], dict[str, Any]]  # the numbers that an Architecture holds, by their names there
    rules: tuple[Rule, ...]
    more_rules: Callable[[Architecture], tuple[Rule, ...]] = lambda _: ()  # those that depend on the numbers
    aliases: Callable[[Architecture], dict[str, str]] = lambda _: {}  # copies that its files may hold -> originals
    is_in_transformers: bool = True
    padding: Callable[[Architecture], dict[str, tuple[int, ...]]] = lambda _: {}  # in its files, read by no forward

    def make_config(self, values: dict[str, Any]) -> PretrainedConfig:
        """The configuration that ``config.json`` holds; a family that transformers has not is read as it stands."""
        if self.is_in_transformers:
            return AutoConfig.for_model(self.model_type, **values)
        kind = type("PlainConfig", (PretrainedConfig,), {"model_type": self.model_type})
        return kind(**values)

    def rules_of(self, architecture: Architecture) -> tuple[Rule, ...]:
        """All of them, for a model of these numbers."""
        return self.rules + self.more_rules(architecture)


LAYER = "model.layers.{layer}."
BLOCK = "layers.{layer}."
LLAMA_RULES = (
    Rule("model.embed_tokens.weight", "embed.weight"),
    Rule("model.norm.weight", "norm.weight"),
    Rule("lm_head.weight", "head.weight"),
    Rule("lm_head.bias", "head.bias"),
    Rule(LAYER + "input_layernorm.weight", BLOCK + "attention_norm.weight"),
    Rule(LAYER + "post_attention_layernorm.weight", BLOCK + "feed_forward_norm.weight"),
    *(
        Rule(f"{LAYER}self_attn.{theirs}_proj.{part}", f"{BLOCK}attention.{ours}.{part}")
        for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out"))
        for part in ("weight", "bias")
    ),
    Rule(LAYER + "self_attn.q_norm.weight", BLOCK + "attention.query_norm.weight"),
    Rule(LAYER + "self_attn.k_norm.weight", BLOCK + "attention.key_norm.weight"),
    *(
        Rule(f"{LAYER}mlp.{name}_proj.{part}", f"{BLOCK}feed_forward.{name}.{part}")
        for name in ("gate", "up", "down")
        for part in ("weight", "bias")
    ),
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
        Rule(f"{theirs}{shared}.{name}_proj.{part}", f"{ours}shared.{name}.{part}")
        for name in ("gate", "up", "down")
        for part in ("weight", "bias")
    )
    return (
        Rule(theirs + "gate.weight", ours + "router.weight"),
        Rule(f"{theirs}experts.{{expert}}.{gate}.weight", ours + "experts.w_up", 0, 2, is_transposed=True),
        Rule(f"{theirs}experts.{{expert}}.{up}.weight", ours + "experts.w_up", 1, 2, is_transposed=True),
        Rule(f"{theirs}experts.{{expert}}.{down}.weight", ours + "experts.w_down", is_transposed=True),
        *(everybody if shared else ()),
    )


def swiglu(d_ff: int, **more: Any) -> FeedForwardSpec:
    """The feed-forward of nearly every family."""
    return FeedForwardSpec(d_ff=d_ff, activation="silu", gated=True, **more)


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
        "rope_parameters": rope_back(spec),
    }


def heads(
    config: PretrainedConfig, rope: dict[str, Any] | None = None, *, rotates_part: bool = False
) -> dict[str, Any]:
    """Fields of an AttentionSpec: sizes and rotation. Most families' code rotates all of a head, whatever they are told."""
    rope = rope or config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = rope.get("partial_rotary_factor", 1.0)
    if share != 1.0 and not rotates_part:
        raise refused(config, "rope_parameters.partial_rotary_factor", share, "1.0")
    return {
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads or config.num_attention_heads,
        "head_dim": head_dim,
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": scaling_of(config, rope),
        "rotary_dim": int(head_dim * share) if share != 1.0 else None,
    }


def biases(config: PretrainedConfig, key: str = "attention_bias") -> dict[str, bool]:
    """Of all four projections, as most families have it."""
    return dict.fromkeys(("bias", "out_bias"), bool(getattr(config, key)))


def biases_back(architecture: Architecture, key: str = "attention_bias") -> dict[str, bool]:
    """The inverse."""
    return {key: architecture.attention.bias}


def windows(
    config: PretrainedConfig, spec: AttentionSpec, layers: Sequence[int] | None = None, **local: Any
) -> dict[str, Any]:
    """Attention of one kind or of two: ``layers`` have a window, by default those that ``layer_types`` calls sliding.

    ``local`` is what else is different there. A window as long as a row may be hides nothing and is none.
    """
    width, num_layers = getattr(config, "sliding_window", None), config.num_hidden_layers
    if layers is None:
        layers = [i for i, kind in enumerate(config.layer_types or ()) if kind == "sliding_attention"]
    if not layers or not (local or (width and width < config.max_position_embeddings)):
        return {"attention": spec}
    windowed = replace(spec, window=width, **local)
    if len(layers) == num_layers:
        return {"attention": windowed}
    return {"attention": spec, "local_attention": windowed, "local_layers": tuple(layers)}


def windows_back(architecture: Architecture) -> dict[str, Any]:
    """The inverse, by ``layer_types``."""
    kinds = [architecture.attention_of(layer) for layer in range(architecture.num_layers)]
    width = next((spec.window for spec in kinds if spec.window), None)
    types = ["sliding_attention" if spec.window else "full_attention" for spec in kinds]
    return {"layer_types": types} | ({"sliding_window": width} if width else {})


def window_everywhere(config: PretrainedConfig, spec: AttentionSpec) -> dict[str, Any]:
    """Attention of a family whose layers all have the window, or none."""
    return windows(config, spec, range(config.num_hidden_layers))


def window_everywhere_back(architecture: Architecture) -> dict[str, Any]:
    """The inverse."""
    return {"sliding_window": architecture.attention.window} if architecture.attention.window else {}


def sparse_everywhere(config: PretrainedConfig, key: str = "num_local_experts", **router: Any) -> dict[str, Any]:
    """Experts of ``intermediate_size`` in every layer; no layer has the dense feed-forward."""
    experts = swiglu(config.intermediate_size)
    spec = RouterSpec(num_experts=getattr(config, key), top_k=config.num_experts_per_tok, **router)
    return {"feed_forward": experts, "moe": MoESpec(router=spec, experts=experts)}


def sparse_everywhere_back(architecture: Architecture, key: str = "num_local_experts") -> dict[str, Any]:
    """The inverse."""
    moe = architecture.moe
    return {
        "intermediate_size": moe.experts.d_ff,
        key: moe.router.num_experts,
        "num_experts_per_tok": moe.router.top_k,
    }


def only_layers(sparse: list[int], num_layers: int) -> dict[str, Any]:
    """Fields of a MoESpec that has experts in these layers alone."""
    dense = tuple(layer for layer in range(sparse[0], num_layers) if layer not in sparse)
    return {"first_layer": sparse[0], "dense_layers": dense}


def rope_back(spec: AttentionSpec | LatentAttentionSpec) -> dict[str, Any]:
    """``rope_parameters`` of a configuration."""
    values: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if isinstance(spec, AttentionSpec):  # said in any case: some families rotate half a head unless told
        rotated = spec.head_dim if spec.rotary_dim is None else spec.rotary_dim
        is_exact = int(spec.head_dim * (rotated / spec.head_dim)) == rotated
        values["partial_rotary_factor"] = (rotated if is_exact else rotated + 0.5) / spec.head_dim
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
    weights = [rope.get(key) or 0.0 for key in ("mscale", "mscale_all_dim")]
    if kind == "yarn" and "attention_factor" not in chosen and all(weights):
        over, under = (mscale(rope["factor"], weight) for weight in weights)
        chosen["attention_factor"] = over / under
    return RopeScaling(kind=kind, factor=rope["factor"], original_length=original, **chosen)


def mscale(factor: float, weight: float) -> float:
    """DeepSeek's YaRN: by how much rows ``factor`` times as long sharpen scores, weighted."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
