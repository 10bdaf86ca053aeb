"""Mixtral: softmax over the chosen two. Source: arXiv:2401.04088; transformers.models.mixtral."""

from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import LLAMA_RULES, Family, common, common_back, heads, moe_rules, no_window, swiglu
from moe_zoo.spec.architecture import Architecture, AttentionSpec, MoESpec, RouterSpec


def read(config: PretrainedConfig) -> Architecture:
    no_window(config)
    router = RouterSpec(num_experts=config.num_local_experts, top_k=config.num_experts_per_tok, normalize=True)
    experts = swiglu(config.intermediate_size)
    return Architecture(
        **common(config),
        attention=AttentionSpec(**heads(config)),
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


FAMILY = Family("mixtral", read, write, LLAMA_RULES + moe_rules("block_sparse_moe", "w1", "w3", "w2"))
