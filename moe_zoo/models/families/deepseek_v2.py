"""DeepSeek-V2: latent attention, a softmax router that may be limited to groups. Source: arXiv:2405.04434, section 2."""

from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import Family, common, common_numbers, moe_rules, swiglu
from moe_zoo.models.families.latent import LATENT_RULES, latent_attention, latent_back, query_rules
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.feed_forward import MoESpec, RouterSpec


def read(config: PretrainedConfig) -> Architecture:
    is_limited = config.topk_method == "group_limited_greedy"
    router = RouterSpec(
        num_experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok,
        scale=config.routed_scaling_factor,
        num_groups=config.n_group if is_limited else 1,
        groups_per_token=config.topk_group if is_limited else 1,
        group_score="max",
    )
    moe = MoESpec(
        router=router,
        experts=swiglu(config.moe_intermediate_size),
        shared=swiglu(config.moe_intermediate_size * config.n_shared_experts),
        first_layer=config.first_k_dense_replace,
    )
    attention, dense = latent_attention(config), swiglu(config.intermediate_size)
    return Architecture(**common(config), attention=attention, feed_forward=dense, moe=moe)


def write(architecture: Architecture) -> dict[str, Any]:
    moe = architecture.moe
    return (
        common_numbers(architecture)
        | latent_back(architecture)
        | {
            "intermediate_size": architecture.feed_forward.d_ff,
            "moe_intermediate_size": moe.experts.d_ff,
            "n_shared_experts": moe.shared.d_ff // moe.experts.d_ff,
            "n_routed_experts": moe.router.num_experts,
            "num_experts_per_tok": moe.router.top_k,
            "routed_scaling_factor": moe.router.scale,
            "topk_method": "group_limited_greedy" if moe.router.num_groups > 1 else "greedy",
            "n_group": moe.router.num_groups,
            "topk_group": moe.router.groups_per_token,
            "first_k_dense_replace": moe.first_layer,
        }
    )


FAMILY = Family("deepseek_v2", read, write, (*LATENT_RULES, *moe_rules(shared="shared_experts")), query_rules)
