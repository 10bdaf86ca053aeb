"""ERNIE 4.5: softmax scores with a selection bias, neighbours rotated in pairs. Source: transformers.models.ernie4_5_moe."""

from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import (
    BLOCK,
    LAYER,
    LLAMA_RULES,
    Family,
    Rule,
    biases,
    biases_back,
    common,
    common_back,
    heads,
    moe_rules,
    refused,
    swiglu,
)
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import AttentionSpec
from moe_zoo.spec.feed_forward import MoESpec, RouterSpec


def read(config: PretrainedConfig) -> Architecture:
    has_bias = bool(config.use_bias)
    attention = AttentionSpec(**heads(config), **biases(config, "use_bias"), rope_interleaved=True)
    return Architecture(
        **common(config),
        attention=attention,
        feed_forward=swiglu(config.intermediate_size, bias=has_bias),
        moe=_moe(config, has_bias),
        head_bias=has_bias,
    )


def _moe(config: PretrainedConfig, has_bias: bool) -> MoESpec:
    router = RouterSpec(num_experts=config.moe_num_experts, top_k=config.moe_k, normalize=True, selection_bias=True)
    start, every = config.moe_layer_start_index, config.moe_layer_interval
    turns = [i for i in range(config.num_hidden_layers) if i >= start and (i + 1) % every == 0]
    if not turns:
        raise refused(config, "moe_layer_start_index", start, "a sparse layer")
    shared = config.moe_intermediate_size * config.moe_num_shared_experts
    return MoESpec(
        router=router,
        experts=swiglu(config.moe_intermediate_size),
        shared=swiglu(shared, bias=has_bias) if shared else None,
        first_layer=turns[0],
        every=every,
        dense_layers=tuple(i for i in turns if i > config.moe_layer_end_index),
    )


def write(architecture: Architecture) -> dict[str, Any]:
    moe = architecture.moe
    return (
        common_back(architecture)
        | biases_back(architecture, "use_bias")
        | {
            "intermediate_size": architecture.feed_forward.d_ff,
            "moe_intermediate_size": moe.experts.d_ff,
            "moe_num_experts": moe.router.num_experts,
            "moe_k": moe.router.top_k,
            "moe_num_shared_experts": moe.shared.d_ff // moe.experts.d_ff if moe.shared else 0,
            "moe_layer_start_index": moe.first_layer,
            "moe_layer_end_index": architecture.sparse_layers[-1],
            "moe_layer_interval": moe.every,
        }
    )


STATICS = Rule(
    LAYER + "mlp.moe_statics.e_score_correction_bias",
    BLOCK + "feed_forward.router.selection_bias",
    has_one_row=True,
)
FAMILY = Family("ernie4_5_moe", read, write, (*LLAMA_RULES, *moe_rules(shared="shared_experts"), STATICS))
