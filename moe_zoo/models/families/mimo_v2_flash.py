"""MiMo-V2-Flash: windows with sinks, more key heads and another rotation there. Source: transformers.models.mimo_v2_flash."""

from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import (
    BLOCK,
    LAYER,
    LLAMA_RULES,
    Family,
    Rule,
    common,
    common_back,
    heads,
    moe_rules,
    only_layers,
    refused,
    rope_back,
    swiglu,
    windows,
    windows_back,
)
from moe_zoo.models.families.deepseek import BIAS_RULE, biased_router, biased_router_back
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import AttentionSpec
from moe_zoo.spec.feed_forward import MoESpec

FULL, LOCAL = "full_attention", "sliding_attention"


def read(config: PretrainedConfig) -> Architecture:
    rope = config.rope_parameters
    spec = AttentionSpec(
        **heads(config, rope[FULL], rotates_part=True),
        bias=bool(config.attention_bias),
        value_dim=config.v_head_dim,
        value_scale=1.0 if config.attention_value_scale is None else config.attention_value_scale,
    )
    there = heads(config, rope[LOCAL], rotates_part=True)
    local = {key: there[key] for key in ("rope_theta", "rope_scaling", "rotary_dim")}
    local |= {"num_kv_heads": 2 * spec.num_kv_heads, "sinks": True}
    return Architecture(
        **common(config),
        **windows(config, spec, **local),
        feed_forward=swiglu(config.intermediate_size),
        moe=_moe(config),
    )


def _moe(config: PretrainedConfig) -> MoESpec:
    sparse = [layer for layer, kind in enumerate(config.mlp_layer_types) if kind == "sparse"]
    if not sparse:
        raise refused(config, "mlp_layer_types", "dense", "a sparse layer")
    experts = swiglu(config.moe_intermediate_size)
    return MoESpec(router=biased_router(config), experts=experts, **only_layers(sparse, config.num_hidden_layers))


def write(architecture: Architecture) -> dict[str, Any]:
    spec, moe = architecture.attention, architecture.moe
    local = architecture.local_attention or spec
    sparse = architecture.sparse_layers
    return (
        common_back(architecture)
        | windows_back(architecture)
        | biased_router_back(architecture)
        | {
            "rope_parameters": {FULL: rope_back(spec), LOCAL: rope_back(local)},
            "attention_bias": spec.bias,
            "v_head_dim": spec.value_width,
            "attention_value_scale": spec.value_scale,
            "intermediate_size": architecture.feed_forward.d_ff,
            "moe_intermediate_size": moe.experts.d_ff,
            "mlp_layer_types": ["sparse" if i in sparse else "dense" for i in range(architecture.num_layers)],
        }
    )


SINKS = Rule(LAYER + "self_attn.attention_sink_bias", BLOCK + "attention.sinks")
FAMILY = Family("mimo_v2_flash", read, write, (*LLAMA_RULES, *moe_rules(), BIAS_RULE, SINKS))
