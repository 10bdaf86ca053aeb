"""Dense Llama-shaped families: what is upcycled into a sparse model.

Source: transformers.models.llama, mistral, qwen2, qwen3.
"""

from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import (
    LLAMA_RULES,
    Family,
    biases,
    biases_back,
    common,
    common_back,
    heads,
    refused,
    swiglu,
    window_everywhere,
    window_everywhere_back,
    windows,
    windows_back,
)
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import AttentionSpec


def _read(config: PretrainedConfig, **attention: bool) -> dict[str, Any]:
    if getattr(config, "mlp_bias", False):
        raise refused(config, "mlp_bias", True, "mlp_bias false")
    spec = AttentionSpec(**heads(config), **attention)
    return common(config) | {"attention": spec, "feed_forward": swiglu(config.intermediate_size)}


def _write(architecture: Architecture) -> dict[str, Any]:
    return common_back(architecture) | {"intermediate_size": architecture.feed_forward.d_ff}


def read_llama(config: PretrainedConfig) -> Architecture:
    return Architecture(**_read(config, **biases(config)))


def write_llama(architecture: Architecture) -> dict[str, Any]:
    return _write(architecture) | biases_back(architecture)


def read_mistral(config: PretrainedConfig) -> Architecture:
    values = _read(config)
    return Architecture(**values | window_everywhere(config, values["attention"]))


def write_mistral(architecture: Architecture) -> dict[str, Any]:
    return _write(architecture) | {"sliding_window": None} | window_everywhere_back(architecture)


def read_qwen2(config: PretrainedConfig) -> Architecture:
    values = _read(config, bias=True)
    return Architecture(**values | windows(config, values["attention"]))


def write_qwen2(architecture: Architecture) -> dict[str, Any]:
    window = windows_back(architecture)
    return _write(architecture) | window | {"use_sliding_window": "sliding_window" in window}


def read_qwen3(config: PretrainedConfig) -> Architecture:
    values = _read(config, qk_norm=True, **biases(config))
    return Architecture(**values | windows(config, values["attention"]))


def write_qwen3(architecture: Architecture) -> dict[str, Any]:
    return write_qwen2(architecture) | biases_back(architecture)


DENSE = (
    Family("llama", read_llama, write_llama, LLAMA_RULES),
    Family("mistral", read_mistral, write_mistral, LLAMA_RULES),
    Family("qwen2", read_qwen2, write_qwen2, LLAMA_RULES),
    Family("qwen3", read_qwen3, write_qwen3, LLAMA_RULES),
)
