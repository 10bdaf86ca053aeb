"""dots.llm1: attention of Qwen3, experts of DeepSeek-V3. Source: arXiv:2506.05767; transformers.models.dots1."""

from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import LLAMA_RULES, Family, common, common_back, heads, moe_rules, refused, swiglu
from moe_zoo.models.families.deepseek import BIAS_RULE, biased_moe, biased_moe_back
from moe_zoo.spec.architecture import Architecture, AttentionSpec


def read(config: PretrainedConfig) -> Architecture:
    if "sliding_attention" in (config.layer_types or ()):
        raise refused(config, "layer_types", "sliding_attention", "full_attention")
    if config.attention_bias:
        raise refused(config, "attention_bias", True, "attention_bias false")
    return Architecture(
        **common(config),
        attention=AttentionSpec(**heads(config), qk_norm=True),
        feed_forward=swiglu(config.intermediate_size),
        moe=biased_moe(config),
    )


def write(architecture: Architecture) -> dict[str, Any]:
    return common_back(architecture) | biased_moe_back(architecture)


FAMILY = Family("dots1", read, write, (*LLAMA_RULES, *moe_rules(shared="shared_experts"), BIAS_RULE))
