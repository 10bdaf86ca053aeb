"""Mixtral: softmax over the chosen two. Source: arXiv:2401.04088; transformers.models.mixtral."""

from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import (
    LLAMA_RULES,
    Family,
    common,
    common_back,
    heads,
    moe_rules,
    sparse_everywhere,
    sparse_everywhere_back,
    window_everywhere,
    window_everywhere_back,
)
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import AttentionSpec


def read(config: PretrainedConfig) -> Architecture:
    attention = window_everywhere(config, AttentionSpec(**heads(config)))
    return Architecture(**common(config), **attention, **sparse_everywhere(config, normalize=True))


def write(architecture: Architecture) -> dict[str, Any]:
    return common_back(architecture) | sparse_everywhere_back(architecture) | window_everywhere_back(architecture)


FAMILY = Family("mixtral", read, write, LLAMA_RULES + moe_rules("block_sparse_moe", "w1", "w3", "w2"))
