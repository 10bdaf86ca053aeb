"""GLM-4.5: half of each head is rotated; sigmoid router with a selection bias. Source: transformers.models.glm4_moe."""

from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import LLAMA_RULES, Family, common, common_back, heads, moe_rules, swiglu
from moe_zoo.models.families.deepseek import BIAS_RULE, biased_moe, biased_moe_back
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import AttentionSpec


def read(config: PretrainedConfig) -> Architecture:
    return Architecture(
        **common(config),
        attention=AttentionSpec(
            **heads(config, rotates_part=True), qk_norm=config.use_qk_norm, bias=config.attention_bias
        ),
        feed_forward=swiglu(config.intermediate_size),
        moe=biased_moe(config),
    )


def write(architecture: Architecture) -> dict[str, Any]:
    return (
        common_back(architecture)
        | biased_moe_back(architecture)
        | {"use_qk_norm": architecture.attention.qk_norm, "attention_bias": architecture.attention.bias}
    )


FAMILY = Family("glm4_moe", read, write, (*LLAMA_RULES, *moe_rules(shared="shared_experts"), BIAS_RULE))
