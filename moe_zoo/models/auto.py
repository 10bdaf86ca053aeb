"""Tell transformers' Auto* classes of our models, without importing torch or transformers before somebody else does.

``import moe_zoo`` installs a watch on three modules of transformers; when the first ``Auto...`` name is asked for, they
load, and our classes and our experts are registered behind them.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

AUTO = "transformers.models.auto"


def register_config(module: ModuleType) -> None:
    """``AutoConfig`` learns of ``moe_zoo``."""
    from moe_zoo.models.config import MoeZooConfig

    module.AutoConfig.register(MoeZooConfig.model_type, MoeZooConfig, exist_ok=True)


def register_model(module: ModuleType) -> None:
    """``AutoModelForCausalLM`` learns of ``MoeZooForCausalLM``, ``AutoModelForSeq2SeqLM`` of its sister."""
    from moe_zoo.models.causal_lm import MoeZooForCausalLM
    from moe_zoo.models.config import MoeZooConfig
    from moe_zoo.models.seq2seq_lm import MoeZooForSeq2SeqLM

    module.AutoModelForCausalLM.register(MoeZooConfig, MoeZooForCausalLM, exist_ok=True)
    module.AutoModelForSeq2SeqLM.register(MoeZooConfig, MoeZooForSeq2SeqLM, exist_ok=True)


def register_experts(module: ModuleType) -> None:
    """``experts_implementation="moe_zoo"`` of any of transformers' sparse models."""

    def experts(self: Any, *inputs: Any) -> Any:
        from moe_zoo.models.experts_interface import moe_zoo_experts

        return moe_zoo_experts(self, *inputs)

    module.ALL_EXPERTS_FUNCTIONS.register("moe_zoo", experts)


REGISTER = {
    f"{AUTO}.configuration_auto": register_config,
    f"{AUTO}.modeling_auto": register_model,
    "transformers.integrations.moe": register_experts,
}


def watch_transformers() -> None:
    """Register now what is loaded already, and the rest when it loads."""
    for name, register in REGISTER.items():
        if name in sys.modules:
            register(sys.modules[name])
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it lets the others find, and wraps what they found."""

    def find_spec(self, name, path=None, target=None):
        if name not in REGISTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        REGISTER[module.__name__](module)
