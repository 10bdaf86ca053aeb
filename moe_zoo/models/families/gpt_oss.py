"""gpt-oss: sinks, windows in every other layer, biases everywhere, a clamped SwiGLU. Source: transformers.models.gpt_oss."""

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
    refused,
    sparse_everywhere_back,
    windows,
    windows_back,
)
from moe_zoo.ops.experts import QUICK
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import AttentionSpec
from moe_zoo.spec.feed_forward import FeedForwardSpec, MoESpec, RouterSpec


def read(config: PretrainedConfig) -> Architecture:
    if config.swiglu_alpha != QUICK:
        raise refused(config, "swiglu_alpha", config.swiglu_alpha, str(QUICK))
    router = RouterSpec(
        num_experts=config.num_local_experts, top_k=config.num_experts_per_tok, normalize=True, bias=True
    )
    experts = FeedForwardSpec(
        d_ff=config.intermediate_size,
        activation="quick_gelu",
        gated=True,
        bias=True,
        limit=config.swiglu_limit,
        up_offset=1.0,
    )
    attention = windows(config, AttentionSpec(**heads(config), **biases(config), sinks=True))
    return Architecture(
        **common(config), **attention, feed_forward=experts, moe=MoESpec(router=router, experts=experts)
    )


def write(architecture: Architecture) -> dict[str, Any]:
    return (
        common_back(architecture)
        | biases_back(architecture)
        | sparse_everywhere_back(architecture)
        | windows_back(architecture)
        | {"swiglu_limit": architecture.moe.experts.limit, "swiglu_alpha": QUICK}
    )


def _rules() -> tuple[Rule, ...]:
    theirs, ours = LAYER + "mlp.", BLOCK + "feed_forward."
    return (
        Rule(LAYER + "self_attn.sinks", BLOCK + "attention.sinks"),
        Rule(theirs + "router.weight", ours + "router.weight"),
        Rule(theirs + "router.bias", ours + "router.bias"),
        Rule(theirs + "experts.gate_up_proj", ours + "experts.w_up", is_stacked=True, is_interleaved=True),
        Rule(theirs + "experts.gate_up_proj_bias", ours + "experts.up_bias", is_stacked=True, is_interleaved=True),
        Rule(theirs + "experts.down_proj", ours + "experts.w_down", is_stacked=True),
        Rule(theirs + "experts.down_proj_bias", ours + "experts.down_bias", is_stacked=True),
    )


FAMILY = Family("gpt_oss", read, write, LLAMA_RULES + _rules())
