"""Qwen3-MoE: normalised queries and keys, renormalised top-k. Source: arXiv:2505.09388; transformers.models.qwen3_moe."""

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
    window_everywhere,
    window_everywhere_back,
)
from moe_zoo.models.families.qwen import qwen_moe, qwen_moe_back
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import AttentionSpec


def read(config: PretrainedConfig) -> Architecture:
    spec = AttentionSpec(**heads(config), **biases(config), qk_norm=True)
    return Architecture(**common(config), **window_everywhere(config, spec), **qwen_moe(config))


def write(architecture: Architecture) -> dict[str, Any]:
    window = window_everywhere_back(architecture)
    return (
        common_back(architecture)
        | biases_back(architecture)
        | qwen_moe_back(architecture)
        | window
        | {"use_sliding_window": bool(window)}
    )


FAMILY = Family("qwen3_moe", read, write, LLAMA_RULES + moe_rules())
