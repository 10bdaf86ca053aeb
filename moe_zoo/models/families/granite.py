"""What Granite's sparse families share: four scales, experts stacked on disk. Source: transformers.models.granitemoe."""

from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import (
    BLOCK,
    LAYER,
    LLAMA_RULES,
    Rule,
    biases,
    biases_back,
    common,
    common_back,
    heads,
    sparse_everywhere,
    sparse_everywhere_back,
)
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import AttentionSpec

SCALES = {"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"}


def read(config: PretrainedConfig) -> Architecture:
    attention = AttentionSpec(**heads(config), **biases(config), scale=config.attention_multiplier)
    return Architecture(
        **common(config),
        attention=attention,
        **sparse_everywhere(config, normalize=True),
        **{ours: float(getattr(config, theirs)) for ours, theirs in SCALES.items()},
        logit_divisor=float(config.logits_scaling),
    )


def write(architecture: Architecture) -> dict[str, Any]:
    numbers = common_back(architecture) | biases_back(architecture) | sparse_everywhere_back(architecture)
    del numbers["head_dim"]  # always d_model / num_heads
    return (
        numbers
        | {theirs: getattr(architecture, ours) for ours, theirs in SCALES.items()}
        | {
            "attention_multiplier": architecture.attention.scale or architecture.attention.head_dim**-0.5,
            "logits_scaling": architecture.logit_divisor,
        }
    )


def rules() -> tuple[Rule, ...]:
    """Of both families."""
    theirs, ours = LAYER + "block_sparse_moe.", BLOCK + "feed_forward."
    stacked = {"is_stacked": True, "is_transposed": True}
    return (
        *LLAMA_RULES,
        Rule(theirs + "router.layer.weight", ours + "router.weight"),
        Rule(theirs + "input_linear.weight", ours + "experts.w_up", **stacked),
        Rule(theirs + "output_linear.weight", ours + "experts.w_down", **stacked),
    )
