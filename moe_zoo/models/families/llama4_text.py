"""Llama 4, its text model: chunks, layers without rotation, one expert that is given the scaled token.

Source: transformers.models.llama4.
"""

from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import (
    BLOCK,
    LAYER,
    LLAMA_RULES,
    Family,
    Rule,
    biases,
    biases_back,
    common,
    common_back,
    heads,
    moe_rules,
    only_layers,
    refused,
    swiglu,
)
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import AttentionSpec
from moe_zoo.spec.feed_forward import MoESpec, RouterSpec


def read(config: PretrainedConfig) -> Architecture:
    rotated = [
        layer for layer, is_rotated in enumerate(config.no_rope_layers[: config.num_hidden_layers]) if is_rotated
    ]
    chunked = [layer for layer, kind in enumerate(config.layer_types) if kind == "chunked_attention"]
    if chunked != rotated:
        raise refused(config, "layer_types", config.layer_types, "chunks in the layers that rotate")
    if config.num_experts_per_tok != 1:
        raise refused(config, "num_experts_per_tok", config.num_experts_per_tok, "1")
    return Architecture(
        **common(config),
        **_attention(config, rotated),
        feed_forward=swiglu(config.intermediate_size_mlp),
        moe=_moe(config),
    )


def _attention(config: PretrainedConfig, rotated: list[int]) -> dict[str, Any]:
    spec = AttentionSpec(**heads(config), **biases(config))
    near = replace(spec, rope_interleaved=True, qk_unit_norm=config.use_qk_norm, chunk=config.attention_chunk_size)
    temperature = config.attn_scale if config.attn_temperature_tuning else 0.0
    far = replace(spec, rotary_dim=0, temperature=temperature, temperature_floor=config.floor_scale)
    if len(rotated) in (0, config.num_hidden_layers):
        return {"attention": near if rotated else far}
    return {"attention": far, "local_attention": near, "local_layers": tuple(rotated)}


def _moe(config: PretrainedConfig) -> MoESpec:
    router = RouterSpec(num_experts=config.num_local_experts, score="sigmoid", scales_input=True)
    experts = swiglu(config.intermediate_size)
    if not config.moe_layers:
        raise refused(config, "moe_layers", config.moe_layers, "a sparse layer")
    layers = only_layers(sorted(config.moe_layers), config.num_hidden_layers)
    return MoESpec(router=router, experts=experts, shared=experts, **layers)


def write(architecture: Architecture) -> dict[str, Any]:
    kinds = [architecture.attention_of(layer) for layer in range(architecture.num_layers)]
    near = next((spec for spec in kinds if spec.rotary_width), None)
    far = next((spec for spec in kinds if not spec.rotary_width), None)
    values = common_back(architecture) | biases_back(architecture)
    values["rope_parameters"].pop("partial_rotary_factor", None)
    if near is not None:
        values |= {"attention_chunk_size": near.chunk, "use_qk_norm": near.qk_unit_norm}
    if far is not None:
        values |= {"attn_temperature_tuning": far.temperature > 0, "floor_scale": far.temperature_floor}
        values |= {"attn_scale": far.temperature} if far.temperature else {}
    return values | {
        "no_rope_layers": [int(spec.rotary_width > 0) for spec in kinds],
        "layer_types": ["chunked_attention" if spec.rotary_width else "full_attention" for spec in kinds],
        "moe_layers": architecture.sparse_layers,
        "intermediate_size": architecture.moe.experts.d_ff,
        "intermediate_size_mlp": architecture.feed_forward.d_ff,
        "num_local_experts": architecture.num_experts,
        "num_experts_per_tok": 1,
    }


def _rules() -> tuple[Rule, ...]:
    theirs, ours = LAYER + "feed_forward.", BLOCK + "feed_forward."
    named_alike = (*LLAMA_RULES, *moe_rules(shared="shared_expert"))
    return (
        *(
            rule._replace(theirs=rule.theirs.replace(".mlp.", ".feed_forward."))
            for rule in named_alike
            if "experts." not in rule.ours and "router" not in rule.ours
        ),
        Rule(theirs + "router.weight", ours + "router.weight"),
        Rule(theirs + "experts.gate_up_proj", ours + "experts.w_up", is_stacked=True),
        Rule(theirs + "experts.down_proj", ours + "experts.w_down", is_stacked=True),
    )


FAMILY = Family("llama4_text", read, write, _rules())
