"""Ling 2.0 (1T, flash, mini): experts of DeepSeek-V3 under grouped-query attention, part of each head rotated.

Not in transformers: ``config.json`` is read as it stands, and no code of the folder runs. Mathematically GLM-4.5 with
other names, against which it is tested. Source: inclusionAI/Ling-V2, models/modeling_bailing_moe_v2.py.
"""

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
    heads,
    moe_rules,
    refused,
    rope_back,
    swiglu,
)
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import AttentionSpec
from moe_zoo.spec.feed_forward import MoESpec, RouterSpec

CODE = "BailingMoeV2ForCausalLM"  # Ling 1 has the same model_type and another router


def read(config: PretrainedConfig) -> Architecture:
    if CODE not in (config.architectures or ()):
        raise refused(config, "architectures", config.architectures, CODE)
    if config.score_function != "sigmoid":
        raise refused(config, "score_function", config.score_function, "sigmoid")
    rope = {"rope_theta": config.rope_theta, "partial_rotary_factor": getattr(config, "partial_rotary_factor", 1.0)}
    attention = AttentionSpec(
        **heads(config, rope | (config.rope_parameters or {}), rotates_part=True),
        qk_norm=config.use_qk_norm,
        bias=config.use_qkv_bias,
        out_bias=config.use_bias,
    )
    dense = swiglu(config.intermediate_size)
    return Architecture(**common(config), attention=attention, feed_forward=dense, moe=_moe(config))


def _moe(config: PretrainedConfig) -> MoESpec:
    router = RouterSpec(
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        score="sigmoid",
        normalize=config.num_experts_per_tok > 1,
        scale=config.routed_scaling_factor,
        selection_bias=True,
        num_groups=config.n_group,
        groups_per_token=config.topk_group,
        group_score="top2",
    )
    shared = config.moe_intermediate_size * (config.num_shared_experts or 0)
    return MoESpec(
        router=router,
        experts=swiglu(config.moe_intermediate_size),
        shared=swiglu(shared) if shared else None,
        first_layer=config.first_k_dense_replace,
    )


def write(architecture: Architecture) -> dict[str, Any]:
    spec, moe = architecture.attention, architecture.moe
    rope = rope_back(spec)
    share = rope.pop("partial_rotary_factor", 1.0)
    return common_numbers(architecture) | {
        "architectures": [CODE],
        "score_function": "sigmoid",
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rope_theta": spec.rope_theta,
        "rope_parameters": rope if spec.rope_scaling else None,
        "partial_rotary_factor": share,
        "use_qk_norm": spec.qk_norm,
        "use_qkv_bias": spec.bias,
        "use_bias": spec.out_bias,
        "intermediate_size": architecture.feed_forward.d_ff,
        "moe_intermediate_size": moe.experts.d_ff,
        "num_experts": moe.router.num_experts,
        "num_shared_experts": moe.shared.d_ff // moe.experts.d_ff if moe.shared else None,
        "num_experts_per_tok": moe.router.top_k,
        "routed_scaling_factor": moe.router.scale,
        "n_group": moe.router.num_groups,
        "topk_group": moe.router.groups_per_token,
        "first_k_dense_replace": moe.first_layer,
    }


def fused_rules(architecture: Architecture) -> tuple[Rule, ...]:
    """Heads of queries, keys and values behind each other in one matrix."""
    spec, rules, start = architecture.attention, [], 0
    for ours, heads_ in (("query", spec.num_heads), ("key", spec.num_kv_heads), ("value", spec.num_kv_heads)):
        rows = range(start, start + heads_ * spec.head_dim)
        start = rows.stop
        rules += [
            Rule(f"{LAYER}attention.query_key_value.{part}", f"{BLOCK}attention.{ours}.{part}", rows=rows)
            for part in ("weight", "bias")
        ]
    return tuple(rules)


RULES = (
    *(rule for rule in LLAMA_RULES if "self_attn" not in rule.theirs and "embed" not in rule.theirs),
    Rule("model.word_embeddings.weight", "embed.weight"),
    Rule(LAYER + "attention.dense.weight", BLOCK + "attention.out.weight"),
    Rule(LAYER + "attention.dense.bias", BLOCK + "attention.out.bias"),
    Rule(LAYER + "attention.query_layernorm.weight", BLOCK + "attention.query_norm.weight"),
    Rule(LAYER + "attention.key_layernorm.weight", BLOCK + "attention.key_norm.weight"),
    *moe_rules(shared="shared_experts"),
    Rule(LAYER + "mlp.gate.expert_bias", BLOCK + "feed_forward.router.selection_bias"),
)
FAMILY = Family("bailing_moe", read, write, RULES, fused_rules, is_in_transformers=False)
