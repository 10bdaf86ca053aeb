"""Qwen2-MoE: biased queries, keys and values, and a gated expert for everybody. Source: arXiv:2407.10671, section 2.2.2."""

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
    swiglu,
    windows,
    windows_back,
)
from moe_zoo.models.families.qwen import qwen_moe, qwen_moe_back
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import AttentionSpec


def read(config: PretrainedConfig) -> Architecture:
    attention = windows(config, AttentionSpec(**heads(config), bias=config.qkv_bias))
    feed_forwards = qwen_moe(config, swiglu(config.shared_expert_intermediate_size))
    return Architecture(**common(config), **attention, **feed_forwards)


def write(architecture: Architecture) -> dict[str, Any]:
    windowed = windows_back(architecture)
    return (
        common_back(architecture)
        | qwen_moe_back(architecture)
        | windowed
        | {"qkv_bias": architecture.attention.bias, "use_sliding_window": "sliding_window" in windowed}
    )


GATE = Rule(LAYER + "mlp.shared_expert_gate.weight", BLOCK + "feed_forward.shared_gate.weight")
FAMILY = Family("qwen2_moe", read, write, (*LLAMA_RULES, *moe_rules(shared="shared_expert"), GATE))
