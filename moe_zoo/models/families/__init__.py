"""The families whose published weights load here and whose models, trained here, load elsewhere.

A family is one file of this folder, with a ``FAMILY``; it is found by being there.
"""

import importlib
import pkgutil
from dataclasses import replace

from moe_zoo.models.families.base import Family, Rule
from moe_zoo.models.families.dense import DENSE

ALIASES = {"kimi_k2": "deepseek_v3"}  # model_type of a published config.json -> family


def _found() -> list[Family]:
    modules = [importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
    return [module.FAMILY for module in modules if hasattr(module, "FAMILY")]


FAMILIES = {family.model_type: family for family in (*_found(), *DENSE)}
FAMILIES["bailing_moe_v2"] = replace(
    FAMILIES["bailing_moe"], model_type="bailing_moe_v2"
)  # under another name the same

__all__ = ["ALIASES", "FAMILIES", "Family", "Rule"]
