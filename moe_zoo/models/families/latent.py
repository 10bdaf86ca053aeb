"""What families with multi-head latent attention share."""

from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import BLOCK, LAYER, LLAMA_RULES, Rule, mscale, rope_back, scaling_of
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import LatentAttentionSpec, RopeScaling

LATENT_RULES = (
    *(rule for rule in LLAMA_RULES if "self_attn" not in rule.theirs),
    Rule(LAYER + "self_attn.q_a_proj.weight", BLOCK + "attention.query_down.weight"),
    Rule(LAYER + "self_attn.q_a_layernorm.weight", BLOCK + "attention.query_norm.weight"),
    Rule(LAYER + "self_attn.kv_a_proj_with_mqa.weight", BLOCK + "attention.latent.weight"),
    Rule(LAYER + "self_attn.kv_a_layernorm.weight", BLOCK + "attention.latent_norm.weight"),
    Rule(LAYER + "self_attn.kv_b_proj.weight", BLOCK + "attention.key_value.weight"),
    Rule(LAYER + "self_attn.o_proj.weight", BLOCK + "attention.out.weight"),
    Rule(LAYER + "self_attn.q_a_proj.bias", BLOCK + "attention.query_down.bias"),
    Rule(LAYER + "self_attn.kv_a_proj_with_mqa.bias", BLOCK + "attention.latent.bias"),
    Rule(LAYER + "self_attn.o_proj.bias", BLOCK + "attention.out.bias"),
)
QUERY = BLOCK + "attention.query.weight"


def query_rules(architecture: Architecture) -> tuple[Rule, ...]:
    """Queries come from a narrow vector, or straight from the hidden state, and are called so."""
    theirs = "q_b_proj" if architecture.attention.query_rank else "q_proj"
    return (Rule(f"{LAYER}self_attn.{theirs}.weight", QUERY),)


def latent_attention(config: PretrainedConfig) -> LatentAttentionSpec:
    """The attention of a DeepSeek-shaped configuration."""
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
        rope_scaling=replace(scaling, score_factor=_score_factor(scaling, rope)) if scaling else None,
        rope_interleaved=getattr(config, "rope_interleave", True),
        bias=bool(config.attention_bias),
    )


def latent_back(architecture: Architecture) -> dict[str, Any]:
    """The inverse, with ``rope_parameters`` that say the same without DeepSeek's two factors."""
    spec = architecture.attention
    return {
        "attention_bias": spec.bias,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_heads,
        "kv_lora_rank": spec.kv_rank,
        "q_lora_rank": spec.query_rank,
        "qk_nope_head_dim": spec.nope_dim,
        "qk_rope_head_dim": spec.rope_dim,
        "v_head_dim": spec.value_dim,
        "rope_parameters": rope_back(spec),
    }


def _score_factor(scaling: RopeScaling, rope: dict[str, Any]) -> float:
    """DeepSeek's YaRN: mscale_all_dim squared on the product of queries and keys."""
    return mscale(scaling.factor, rope.get("mscale_all_dim") or 0.0) ** 2
