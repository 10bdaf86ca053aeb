"""The families whose published weights load here and whose models, trained here, load elsewhere."""

from moe_zoo.models.families import (
    deepseek_v2,
    deepseek_v3,
    dots1,
    glm4_moe,
    minimax_m2,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
    switch_transformers,
)
from moe_zoo.models.families.base import Family, Rule

FAMILIES = {
    module.FAMILY.model_type: module.FAMILY
    for module in (
        deepseek_v2,
        deepseek_v3,
        dots1,
        glm4_moe,
        minimax_m2,
        mixtral,
        olmoe,
        qwen2_moe,
        qwen3_moe,
        switch_transformers,
    )
}

ALIASES = {"kimi_k2": "deepseek_v3"}  # model_type of a published config.json -> family

__all__ = ["ALIASES", "FAMILIES", "Family", "Rule"]
