"""LongCat-Flash: two latent attentions and two dense feed-forwards beside a sparse one, some of whose experts give back
what they get. Source: arXiv:2509.01322; transformers.models.longcat_flash.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import (
    BLOCK,
    LAYER,
    LLAMA_RULES,
    Family,
    Rule,
    common,
    common_numbers,
    moe_rules,
    refused,
    swiglu,
)
from moe_zoo.models.families.latent import LATENT_RULES, QUERY, latent_attention, latent_back
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.feed_forward import MoESpec, RouterSpec

# What published files say beside transformers, which reads none of it and computes as if it were so.
ASSUMED = {
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "norm_topk_prob": False,
    "router_bias": False,  # transformers keeps such a bias and never adds it
    "zero_expert_type": "identity",
}


def read(config: PretrainedConfig) -> Architecture:
    derived = {
        "head_dim": config.qk_rope_head_dim,
        "qk_head_dim": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "num_key_value_heads": config.num_attention_heads,
    }
    for key, known in (ASSUMED | derived).items():
        if (value := getattr(config, key, None)) not in (None, known):
            raise refused(config, key, value, str(known))
    return Architecture(
        **common(config) | {"num_layers": config.num_layers},
        attention=replace(latent_attention(config), scales_ranks=True),
        feed_forward=swiglu(config.ffn_hidden_size),
        moe=MoESpec(router=_router(config), experts=swiglu(config.expert_ffn_hidden_size)),
        shortcut=True,
    )


def _router(config: PretrainedConfig) -> RouterSpec:
    return RouterSpec(
        num_experts=config.n_routed_experts,
        zero_experts=config.zero_expert_num or 0,
        top_k=config.moe_topk,
        scale=config.routed_scaling_factor,
        selection_bias=True,
    )


def write(architecture: Architecture) -> dict[str, Any]:
    spec, moe = architecture.attention, architecture.moe
    values = common_numbers(architecture) | latent_back(architecture) | ASSUMED
    del values["num_hidden_layers"]
    return values | {
        "num_layers": architecture.num_layers,
        "head_dim": spec.rope_dim,
        "qk_head_dim": spec.head_dim,
        "ffn_hidden_size": architecture.feed_forward.d_ff,
        "expert_ffn_hidden_size": moe.experts.d_ff,
        "n_routed_experts": moe.router.num_experts,
        "zero_expert_num": moe.router.zero_experts,
        "moe_topk": moe.router.top_k,
        "routed_scaling_factor": moe.router.scale,
    }


def _half(place: int, ours: str) -> Iterator[Rule]:
    """An attention, the dense feed-forward behind it, and the norms before them."""
    names = [("self_attn.", f"self_attn.{place}."), ("mlp.", f"mlps.{place}.")]
    names += [(f"{norm}_layernorm.", f"{norm}_layernorm.{place}.") for norm in ("input", "post_attention")]
    for rule in (*LATENT_RULES, Rule(LAYER + "self_attn.q_b_proj.weight", QUERY)):
        if rule.theirs.startswith(LAYER):
            theirs = rule.theirs
            for before, after in names:
                theirs = theirs.replace(f"}}.{before}", f"}}.{after}")
            yield Rule(theirs, rule.ours.replace(BLOCK, f"{BLOCK}{ours}."))


def padding(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """transformers has matrices for experts without weights, which it never reads, and wants them in the files."""
    router, shape = architecture.moe.router, (architecture.moe.experts.d_ff, architecture.d_model)
    return {
        f"{LAYER.format(layer=layer)}mlp.experts.{expert}.{name}_proj.weight": shape
        for layer in range(architecture.num_layers)
        for expert in range(router.num_experts, router.num_scored)
        for name in ("gate", "up")
    }


SPARSE = BLOCK + "sparse."
RULES = (
    *(rule for rule in LLAMA_RULES if not rule.theirs.startswith(LAYER)),
    *_half(0, "first"),
    *_half(1, "second"),
    Rule(LAYER + "mlp.router.classifier.weight", SPARSE + "router.weight"),
    Rule(LAYER + "mlp.router.e_score_correction_bias", SPARSE + "router.selection_bias"),
    *(
        rule._replace(ours=rule.ours.replace(BLOCK + "feed_forward.", SPARSE))
        for rule in moe_rules()
        if "{expert}" in rule.theirs
    ),
)
FAMILY = Family("longcat_flash", read, write, RULES, padding=padding)
