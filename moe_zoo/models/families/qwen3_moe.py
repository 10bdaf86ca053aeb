"""Qwen3-MoE: normalised queries and keys, renormalised top-k. Source: arXiv:2505.09388; transformers.models.qwen3_moe."""

from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import (
    LLAMA_RULES,
    Family,
    common,
    common_back,
    dense_layers,
    heads,
    moe_rules,
    no_window,
    refused,
    swiglu,
)
from moe_zoo.spec.architecture import Architecture, AttentionSpec, MoESpec, RouterSpec


def read(config: PretrainedConfig) -> Architecture:
    no_window(config)
    if config.attention_bias:
        raise refused(config, "attention_bias", True, "attention_bias false")
    router = RouterSpec(
        num_experts=config.num_experts, top_k=config.num_experts_per_tok, normalize=config.norm_topk_prob
    )
    return Architecture(
        **common(config),
        attention=AttentionSpec(**heads(config), qk_norm=True),
        feed_forward=swiglu(config.intermediate_size),
        moe=MoESpec(
            router=router,
            experts=swiglu(config.moe_intermediate_size),
            first_layer=config.decoder_sparse_step - 1,
            every=config.decoder_sparse_step,
            dense_layers=dense_layers(config),
        ),
    )


def write(architecture: Architecture) -> dict[str, Any]:
    moe = architecture.moe
    return common_back(architecture) | {
        "intermediate_size": architecture.feed_forward.d_ff,
        "moe_intermediate_size": moe.experts.d_ff,
        "num_experts": moe.router.num_experts,
        "num_experts_per_tok": moe.router.top_k,
        "norm_topk_prob": moe.router.normalize,
        "decoder_sparse_step": moe.every,
        "mlp_only_layers": list(moe.dense_layers),
    }


FAMILY = Family("qwen3_moe", read, write, LLAMA_RULES + moe_rules())
