"""What Qwen's sparse families share: experts in every so many layers, but those that stay dense."""

from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import swiglu
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.feed_forward import FeedForwardSpec, MoESpec, RouterSpec


def qwen_moe(config: PretrainedConfig, shared: FeedForwardSpec | None = None) -> dict[str, Any]:
    """Both kinds of feed-forward; a shared expert is gated."""
    router = RouterSpec(
        num_experts=config.num_experts, top_k=config.num_experts_per_tok, normalize=config.norm_topk_prob
    )
    moe = MoESpec(
        router=router,
        experts=swiglu(config.moe_intermediate_size),
        shared=shared,
        shared_gate=shared is not None,
        first_layer=config.decoder_sparse_step - 1,
        every=config.decoder_sparse_step,
        dense_layers=tuple(config.mlp_only_layers or ()),
    )
    return {"feed_forward": swiglu(config.intermediate_size), "moe": moe}


def qwen_moe_back(architecture: Architecture) -> dict[str, Any]:
    """The inverse."""
    moe = architecture.moe
    return {
        "intermediate_size": architecture.feed_forward.d_ff,
        "moe_intermediate_size": moe.experts.d_ff,
        "num_experts": moe.router.num_experts,
        "num_experts_per_tok": moe.router.top_k,
        "norm_topk_prob": moe.router.normalize,
        "decoder_sparse_step": moe.every,
        "mlp_only_layers": list(moe.dense_layers),
    } | ({"shared_expert_intermediate_size": moe.shared.d_ff} if moe.shared else {})
