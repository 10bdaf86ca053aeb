"""OLMoE: queries and keys normalised over all heads. Source: arXiv:2409.02060; transformers.models.olmoe."""

from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import (
    LLAMA_RULES,
    Family,
    biases,
    biases_back,
    common,
    common_back,
    heads,
    moe_rules,
    refused,
    sparse_everywhere,
    sparse_everywhere_back,
)
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import AttentionSpec


def read(config: PretrainedConfig) -> Architecture:
    if config.clip_qkv is not None:
        raise refused(config, "clip_qkv", config.clip_qkv, "clip_qkv null")
    attention = AttentionSpec(**heads(config), **biases(config), qk_norm=True, qk_norm_over="all")
    experts = sparse_everywhere(config, "num_experts", normalize=config.norm_topk_prob)
    return Architecture(**common(config), attention=attention, **experts)


def write(architecture: Architecture) -> dict[str, Any]:
    return (
        common_back(architecture)
        | biases_back(architecture)
        | sparse_everywhere_back(architecture, "num_experts")
        | {"norm_topk_prob": architecture.moe.router.normalize}
    )


FAMILY = Family("olmoe", read, write, LLAMA_RULES + moe_rules())
