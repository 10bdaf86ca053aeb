"""What families with multi-head latent attention share."""

import math
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import BLOCK, LAYER, LLAMA_RULES, Rule, refused, rope_back, scaling_of
from moe_zoo.spec.architecture import Architecture, LatentAttentionSpec, RopeScaling

LATENT_RULES = (
    *(rule for rule in LLAMA_RULES if "self_attn" not in rule.theirs),
    Rule(LAYER + "self_attn.q_a_proj.weight", BLOCK + "attention.query_down.weight"),
    Rule(LAYER + "self_attn.q_a_layernorm.weight", BLOCK + "attention.query_norm.weight"),
    Rule(LAYER + "self_attn.kv_a_proj_with_mqa.weight", BLOCK + "attention.latent.weight"),
    Rule(LAYER + "self_attn.kv_a_layernorm.weight", BLOCK + "attention.latent_norm.weight"),
    Rule(LAYER + "self_attn.kv_b_proj.weight", BLOCK + "attention.key_value.weight"),
    Rule(LAYER + "self_attn.o_proj.weight", BLOCK + "attention.out.weight"),
)
QUERY = BLOCK + "attention.query.weight"


def query_rules(architecture: Architecture) -> tuple[Rule, ...]:
    """Queries come from a narrow vector, or straight from the hidden state, and are called so."""
    theirs = "q_b_proj" if architecture.attention.query_rank else "q_proj"
    return (Rule(f"{LAYER}self_attn.{theirs}.weight", QUERY),)


def latent_attention(config: PretrainedConfig) -> LatentAttentionSpec:
    """The attention of a DeepSeek-shaped configuration."""
    if config.attention_bias:
        raise refused(config, "attention_bias", True, "attention_bias false")
    rope = config.rope_parameters
    scaling = scaling_of(config, rope)
    return LatentAttentionSpec(
        num_heads=config.num_attention_heads,
        kv_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        query_rank=config.q_lora_rank,
        rope_theta=rope["rope_theta"],
        rope_scaling=replace(scaling, **_mscales(scaling, rope)) if scaling else None,
        rope_interleaved=getattr(config, "rope_interleave", True),
    )


def latent_back(architecture: Architecture) -> dict[str, Any]:
    """The inverse, with ``rope_parameters`` that say the same without DeepSeek's two factors."""
    spec = architecture.attention
    return {
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_heads,
        "kv_lora_rank": spec.kv_rank,
        "q_lora_rank": spec.query_rank,
        "qk_nope_head_dim": spec.nope_dim,
        "qk_rope_head_dim": spec.rope_dim,
        "v_head_dim": spec.value_dim,
        "rope_parameters": rope_back(spec),
    }


def _mscales(scaling: RopeScaling, rope: dict[str, Any]) -> dict[str, float]:
    """DeepSeek's YaRN: mscale over mscale_all_dim on queries and keys, the latter squared on their product."""
    mscale, all_dim = rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0
    factors = {"score_factor": _mscale(scaling.factor, all_dim) ** 2} if all_dim else {}
    if scaling.attention_factor is None and mscale and all_dim:
        factors["attention_factor"] = _mscale(scaling.factor, mscale) / _mscale(scaling.factor, all_dim)
    return factors


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
