"""OLMoE: queries and keys normalised over all heads. Source: arXiv:2409.02060; transformers.models.olmoe."""

from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import LLAMA_RULES, Family, common, common_back, heads, moe_rules, refused, swiglu
from moe_zoo.spec.architecture import Architecture, AttentionSpec, MoESpec, RouterSpec


def read(config: PretrainedConfig) -> Architecture:
    if config.clip_qkv is not None:
        raise refused(config, "clip_qkv", config.clip_qkv, "clip_qkv null")
    if config.attention_bias:
        raise refused(config, "attention_bias", True, "attention_bias false")
    router = RouterSpec(
        num_experts=config.num_experts, top_k=config.num_experts_per_tok, normalize=config.norm_topk_prob
    )
    experts = swiglu(config.intermediate_size)
    return Architecture(
        **common(config),
        attention=AttentionSpec(**heads(config), qk_norm=True, qk_norm_over="all"),
        feed_forward=experts,
        moe=MoESpec(router=router, experts=experts),
    )


def write(architecture: Architecture) -> dict[str, Any]:
    moe = architecture.moe
    return common_back(architecture) | {
        "intermediate_size": moe.experts.d_ff,
        "num_experts": moe.router.num_experts,
        "num_experts_per_tok": moe.router.top_k,
        "norm_topk_prob": moe.router.normalize,
    }


FAMILY = Family("olmoe", read, write, LLAMA_RULES + moe_rules())
