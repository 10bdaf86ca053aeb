"""Phi-3.5-MoE: SparseMixer, layer norms, biases. Source: arXiv:2409.12136; transformers.models.phimoe."""

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
    refused,
    sparse_everywhere,
    sparse_everywhere_back,
    window_everywhere,
    window_everywhere_back,
)
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import AttentionSpec


def read(config: PretrainedConfig) -> Architecture:
    if config.num_experts_per_tok != 2:
        raise refused(config, "num_experts_per_tok", config.num_experts_per_tok, "2")
    attention = window_everywhere(config, AttentionSpec(**heads(config), **biases(config)))
    experts = sparse_everywhere(config, score="sparsemixer", tolerance=config.router_jitter_noise)
    architecture = Architecture(**common(config), **attention, **experts)
    return replace(architecture, norm="layernorm", head_bias=config.lm_head_bias)


def write(architecture: Architecture) -> dict[str, Any]:
    numbers = common_back(architecture) | biases_back(architecture) | sparse_everywhere_back(architecture)
    del numbers["head_dim"]  # always d_model / num_heads
    return (
        numbers
        | window_everywhere_back(architecture)
        | {"router_jitter_noise": architecture.moe.router.tolerance, "lm_head_bias": architecture.head_bias}
    )


NORM_BIASES = (
    Rule("model.norm.bias", "norm.bias"),
    Rule(LAYER + "input_layernorm.bias", BLOCK + "attention_norm.bias"),
    Rule(LAYER + "post_attention_layernorm.bias", BLOCK + "feed_forward_norm.bias"),
)
FAMILY = Family("phimoe", read, write, (*LLAMA_RULES, *NORM_BIASES, *moe_rules("block_sparse_moe", "w1", "w3", "w2")))
