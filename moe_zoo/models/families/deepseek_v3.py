"""DeepSeek-V3 and Kimi K2: latent attention, a sigmoid router with groups. Source: arXiv:2412.19437, section 2.1."""

from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import Family, common, common_numbers, moe_rules, swiglu
from moe_zoo.models.families.deepseek import BIAS_RULE, biased_moe, biased_moe_back
from moe_zoo.models.families.latent import LATENT_RULES, latent_attention, latent_back, query_rules
from moe_zoo.spec.architecture import Architecture


def read(config: PretrainedConfig) -> Architecture:
    return Architecture(
        **common(config),
        attention=latent_attention(config),
        feed_forward=swiglu(config.intermediate_size),
        moe=biased_moe(config),
    )


def write(architecture: Architecture) -> dict[str, Any]:
    interleaved = {"rope_interleave": architecture.attention.rope_interleaved}
    return common_numbers(architecture) | latent_back(architecture) | biased_moe_back(architecture) | interleaved


RULES = (*LATENT_RULES, *moe_rules(shared="shared_experts"), BIAS_RULE)
FAMILY = Family("deepseek_v3", read, write, RULES, query_rules)
