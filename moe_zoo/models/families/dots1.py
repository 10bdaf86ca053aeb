"""dots.llm1: attention of Qwen3, experts of DeepSeek-V3. Source: arXiv:2506.05767; transformers.models.dots1."""

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
    swiglu,
    windows,
    windows_back,
)
from moe_zoo.models.families.deepseek import BIAS_RULE, biased_moe, biased_moe_back
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import AttentionSpec


def read(config: PretrainedConfig) -> Architecture:
    attention = windows(config, AttentionSpec(**heads(config), **biases(config), qk_norm=True))
    dense = swiglu(config.intermediate_size)
    return Architecture(**common(config), **attention, feed_forward=dense, moe=biased_moe(config))


def write(architecture: Architecture) -> dict[str, Any]:
    return (
        common_back(architecture)
        | biases_back(architecture)
        | biased_moe_back(architecture)
        | windows_back(architecture)
    )


FAMILY = Family("dots1", read, write, (*LLAMA_RULES, *moe_rules(shared="shared_experts"), BIAS_RULE))
