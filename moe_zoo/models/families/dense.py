"""Dense Llama-shaped families: what is upcycled into a sparse model. Source: transformers.models.{llama,qwen2,qwen3}."""

from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import LLAMA_RULES, Family, common, common_back, heads, no_window, refused, swiglu
from moe_zoo.spec.architecture import Architecture, AttentionSpec


def _read(config: PretrainedConfig, *, bias: bool = False, qk_norm: bool = False) -> Architecture:
    for key in ("attention_bias", "mlp_bias"):
        if getattr(config, key, False):
            raise refused(config, key, True, f"{key} false")
    if getattr(config, "use_sliding_window", True):
        no_window(config)
    attention = AttentionSpec(**heads(config), bias=bias, qk_norm=qk_norm)
    return Architecture(**common(config), attention=attention, feed_forward=swiglu(config.intermediate_size))


def _write(architecture: Architecture) -> dict[str, Any]:
    return common_back(architecture) | {"intermediate_size": architecture.feed_forward.d_ff}


def _family(model_type: str, **attention: bool) -> Family:
    return Family(model_type, lambda config: _read(config, **attention), _write, LLAMA_RULES)


DENSE = (_family("llama"), _family("mistral"), _family("qwen2", bias=True), _family("qwen3", qk_norm=True))
