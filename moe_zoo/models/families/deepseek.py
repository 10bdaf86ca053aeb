"""What families of the DeepSeek-V3 kind share: a sigmoid router with groups and a selection bias, and shared experts."""

from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import BLOCK, LAYER, Rule, swiglu
from moe_zoo.spec.architecture import Architecture, MoESpec, RouterSpec

BIAS_RULE = Rule(LAYER + "mlp.gate.e_score_correction_bias", BLOCK + "feed_forward.router.selection_bias")


def biased_moe(config: PretrainedConfig) -> MoESpec:
    """The sparse layers. Several shared experts are one, wider."""
    router = RouterSpec(
        num_experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok,
        score="sigmoid",
        normalize=bool(config.norm_topk_prob),
        scale=config.routed_scaling_factor,
        selection_bias=True,
        num_groups=config.n_group or 1,
        groups_per_token=config.topk_group or 1,
        group_score="top2",
    )
    shared = config.moe_intermediate_size * (config.n_shared_experts or 0)
    return MoESpec(
        router=router,
        experts=swiglu(config.moe_intermediate_size),
        shared=swiglu(shared) if shared else None,
        first_layer=config.first_k_dense_replace or 0,
    )


def biased_moe_back(architecture: Architecture) -> dict[str, Any]:
    """The inverse."""
    moe = architecture.moe
    return {
        "intermediate_size": architecture.feed_forward.d_ff,
        "moe_intermediate_size": moe.experts.d_ff,
        "n_shared_experts": moe.shared.d_ff // moe.experts.d_ff if moe.shared else None,
        "n_routed_experts": moe.router.num_experts,
        "num_experts_per_tok": moe.router.top_k,
        "norm_topk_prob": moe.router.normalize,
        "routed_scaling_factor": moe.router.scale,
        "n_group": moe.router.num_groups,
        "topk_group": moe.router.groups_per_token,
        "first_k_dense_replace": moe.first_layer,
    }
