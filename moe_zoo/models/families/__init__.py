"""The families whose published weights load here and whose models, trained here, load elsewhere."""

from dataclasses import replace

from moe_zoo.models.families import (
    bailing_moe,
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie4_5_moe,
    glm4_moe,
    gpt_oss,
    granitemoe,
    granitemoeshared,
    llama4_text,
    longcat_flash,
    mimo_v2_flash,
    minimax_m2,
    mixtral,
    olmoe,
    phimoe,
    qwen2_moe,
    qwen3_moe,
    switch_transformers,
)
from moe_zoo.models.families.base import Family, Rule
from moe_zoo.models.families.dense import DENSE

MODULES = (
    bailing_moe,
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie4_5_moe,
    glm4_moe,
    gpt_oss,
    granitemoe,
    granitemoeshared,
    llama4_text,
    longcat_flash,
    mimo_v2_flash,
    minimax_m2,
    mixtral,
    olmoe,
    phimoe,
    qwen2_moe,
    qwen3_moe,
    switch_transformers,
)
FAMILIES = {module.FAMILY.model_type: module.FAMILY for module in MODULES}
FAMILIES["bailing_moe_v2"] = replace(bailing_moe.FAMILY, model_type="bailing_moe_v2")  # the same under another name
FAMILIES |= {family.model_type: family for family in DENSE}

ALIASES = {"kimi_k2": "deepseek_v3"}  # model_type of a published config.json -> family

__all__ = ["ALIASES", "FAMILIES", "Family", "Rule"]
