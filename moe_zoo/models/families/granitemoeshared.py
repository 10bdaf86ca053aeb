"""Granite MoE with an expert for everybody. Source: transformers.models.granitemoeshared."""

from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families import granite
from moe_zoo.models.families.base import BLOCK, LAYER, Family, Rule, swiglu
from moe_zoo.spec.architecture import Architecture


def read(config: PretrainedConfig) -> Architecture:
    architecture = granite.read(config)
    shared = swiglu(config.shared_intermediate_size) if config.shared_intermediate_size else None
    return replace(architecture, moe=replace(architecture.moe, shared=shared))


def write(architecture: Architecture) -> dict[str, Any]:
    shared = architecture.moe.shared
    return granite.write(architecture) | {"shared_intermediate_size": shared.d_ff if shared else 0}


def shared_rules(architecture: Architecture) -> tuple[Rule, ...]:
    """Gate and up behind each other in one matrix."""
    theirs, ours = LAYER + "shared_mlp.", BLOCK + "feed_forward.shared."
    d_ff = architecture.moe.shared.d_ff if architecture.moe.shared else 0
    return (
        Rule(theirs + "input_linear.weight", ours + "gate.weight", rows=range(d_ff)),
        Rule(theirs + "input_linear.weight", ours + "up.weight", rows=range(d_ff, 2 * d_ff)),
        Rule(theirs + "output_linear.weight", ours + "down.weight"),
    )


FAMILY = Family("granitemoeshared", read, write, granite.rules(), shared_rules)
