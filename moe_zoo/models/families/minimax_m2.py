"""MiniMax-M2: normalised over all heads, part of each rotated, a sigmoid router. Source: transformers.models.minimax_m2."""

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
)
from moe_zoo.spec.architecture import Architecture, AttentionSpec, MoESpec, RouterSpec


def read(config: PretrainedConfig) -> Architecture:
    router = RouterSpec(
        num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        score="sigmoid",
        normalize=True,
        selection_bias=True,
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
        "num_local_experts": moe.router.num_experts,
        "num_experts_per_tok": moe.router.top_k,
    }


BIAS = Rule(LAYER + "block_sparse_moe.e_score_correction_bias", BLOCK + "feed_forward.router.selection_bias")
FAMILY = Family("minimax_m2", read, write, (*LLAMA_RULES, *moe_rules("block_sparse_moe", "w1", "w3", "w2"), BIAS))
