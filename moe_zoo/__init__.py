"""moe-zoo: Mixture-of-Experts language models, trained at any size. Importing this costs no torch."""

import importlib
from typing import Any

__version__ = "0.1.0"
_HOME = {
    "Architecture": "moe_zoo.spec.architecture",
    "MoeZooError": "moe_zoo.spec.errors",
    "ParallelLayout": "moe_zoo.spec.layout",
    "Recipe": "moe_zoo.spec.recipe",
    "load": "moe_zoo.models.hub",
    "load_preset": "moe_zoo.spec.presets",
    "load_recipe": "moe_zoo.spec.recipe_file",
    "num_active_parameters": "moe_zoo.spec.accounting",
    "num_parameters": "moe_zoo.spec.accounting",
    "preset_names": "moe_zoo.spec.presets",
    "resolve_layout": "moe_zoo.spec.layout",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


from moe_zoo.models.auto import watch_transformers  # noqa: E402

watch_transformers()
