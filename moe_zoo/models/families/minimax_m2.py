"""MiniMax-M2: normalised over all heads, part of each rotated, a sigmoid router. Source: transformers.models.minimax_m2."""

from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import (
    BLOCK,
    LAYER,
    LLAMA_RULES,
    Family,
    Rule,
    common,
    common_back,
    heads,
    moe_rules,
    sparse_everywhere,
    sparse_everywhere_back,
)
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import AttentionSpec


def read(config: PretrainedConfig) -> Architecture:
    attention = AttentionSpec(**heads(config, rotates_part=True), qk_norm=True, qk_norm_over="all")
    experts = sparse_everywhere(config, score="sigmoid", normalize=True, selection_bias=True)
    return Architecture(**common(config), attention=attention, **experts)


def write(architecture: Architecture) -> dict[str, Any]:
    return common_back(architecture) | sparse_everywhere_back(architecture)


BIAS = Rule(LAYER + "block_sparse_moe.e_score_correction_bias", BLOCK + "feed_forward.router.selection_bias")
FAMILY = Family("minimax_m2", read, write, (*LLAMA_RULES, *moe_rules("block_sparse_moe", "w1", "w3", "w2"), BIAS))
