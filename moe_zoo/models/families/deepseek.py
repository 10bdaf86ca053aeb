"""What families of the DeepSeek-V3 kind share: a sigmoid router with groups and a selection bias, and shared experts."""

from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import BLOCK, LAYER, Rule, swiglu
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.errors import CheckpointError
from moe_zoo.spec.feed_forward import MoESpec, RouterSpec

BIAS_RULE = Rule(LAYER + "mlp.gate.e_score_correction_bias", BLOCK + "feed_forward.router.selection_bias")


def biased_router(config: PretrainedConfig) -> RouterSpec:
    """Sigmoid scores, and a bias that moves the choice."""
    return RouterSpec(
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


def biased_moe(config: PretrainedConfig) -> MoESpec:
    """The sparse layers. Several shared experts are one, wider."""
    shared = config.moe_intermediate_size * (config.n_shared_experts or 0)
    return MoESpec(
        router=biased_router(config),
        experts=swiglu(config.moe_intermediate_size),
        shared=swiglu(shared) if shared else None,
        first_layer=config.first_k_dense_replace or 0,
    )


def biased_router_back(architecture: Architecture) -> dict[str, Any]:
    """The inverse of ``biased_router``."""
    router = architecture.moe.router
    return {
        "n_routed_experts": router.num_experts,
        "num_experts_per_tok": router.top_k,
        "norm_topk_prob": router.normalize,
        "routed_scaling_factor": router.scale,
        "n_group": router.num_groups,
        "topk_group": router.groups_per_token,
    }


def biased_moe_back(architecture: Architecture) -> dict[str, Any]:
    """The inverse of ``biased_moe``. transformers cannot build these families without a shared expert."""
    moe = architecture.moe
    if moe.shared is None:
        raise CheckpointError("save_pretrained: moe.shared: null; this family always has one; save the model as ours")
    return biased_router_back(architecture) | {
        "intermediate_size": architecture.feed_forward.d_ff,
        "moe_intermediate_size": moe.experts.d_ff,
        "n_shared_experts": moe.shared.d_ff // moe.experts.d_ff,
        "first_k_dense_replace": moe.first_layer,
    }
