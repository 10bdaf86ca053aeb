"""Text to training batches: prepare a corpus once, then stream it in an order that no layout changes.

Never imports moe_zoo, never imports torch. Importing this package costs nothing: names load on first use.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

_HOME = {
    "DataError": "errors",
    "StreamError": "errors",
    "Document": "corpus",
    "documents": "corpus",
    "Tokenizer": "tokenizer",
    "load_tokenizer": "tokenizer",
    "train_tokenizer": "tokenizer",
    "PrepareSpec": "prepare",
    "PreparedSummary": "prepare",
    "prepare": "prepare",
    "open_store": "store",
    "RowOrder": "order",
    "ShardIndex": "shards",
    "ShardReader": "shards",
    "RowBatch": "stream",
    "StreamState": "stream",
    "TokenStream": "stream",
    "valid_rows": "stream",
    "Baselines": "baselines",
    "ngram_baselines": "baselines",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """``data_pipelines.prepare`` is always the function, whether or not its file of that name was imported before."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
