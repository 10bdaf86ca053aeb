"""Qwen2-MoE: biased queries, keys and values, and a gated expert for everybody. Source: arXiv:2407.10671, section 2.2.2."""

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
    dense_layers,
    heads,
    moe_rules,
    no_window,
    swiglu,
)
from moe_zoo.spec.architecture import Architecture, AttentionSpec, MoESpec, RouterSpec


def read(config: PretrainedConfig) -> Architecture:
    if config.use_sliding_window:
        no_window(config)
    router = RouterSpec(
        num_experts=config.num_experts, top_k=config.num_experts_per_tok, normalize=config.norm_topk_prob
    )
    return Architecture(
        **common(config),
        attention=AttentionSpec(**heads(config), bias=config.qkv_bias),
        feed_forward=swiglu(config.intermediate_size),
        moe=MoESpec(
            router=router,
            experts=swiglu(config.moe_intermediate_size),
            shared=swiglu(config.shared_expert_intermediate_size),
            shared_gate=True,
            first_layer=config.decoder_sparse_step - 1,
            every=config.decoder_sparse_step,
            dense_layers=dense_layers(config),
        ),
    )


def write(architecture: Architecture) -> dict[str, Any]:
    moe = architecture.moe
    return common_back(architecture) | {
        "qkv_bias": architecture.attention.bias,
        "intermediate_size": architecture.feed_forward.d_ff,
        "moe_intermediate_size": moe.experts.d_ff,
        "shared_expert_intermediate_size": moe.shared.d_ff,
        "num_experts": moe.router.num_experts,
        "num_experts_per_tok": moe.router.top_k,
        "norm_topk_prob": moe.router.normalize,
        "decoder_sparse_step": moe.every,
        "mlp_only_layers": list(moe.dense_layers),
    }


GATE = Rule(LAYER + "mlp.shared_expert_gate.weight", BLOCK + "feed_forward.shared_gate.weight")
FAMILY = Family("qwen2_moe", read, write, (*LLAMA_RULES, *moe_rules(shared="shared_expert"), GATE))
