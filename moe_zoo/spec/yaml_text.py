"""YAML as people mean it: ``3e-4`` is a number, ``off`` is a word, and no key stands twice.

PyYAML reads YAML 1.1, where ``3e-4`` is a string, ``off`` is false and ``010`` is eight. Every YAML text of the
project passes through here.
"""

import re
from typing import Any

import yaml

from moe_zoo.spec.errors import RecipeError

_FLOAT = re.compile(
    r"[-+]?(\.\d+|\d+\.\d*)([eE][-+]?\d+)?$|[-+]?\d+[eE][-+]?\d+$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
_CORE_SCHEMA = {  # YAML 1.2, section 10.3.2, less octal and hexadecimal
    "null": (re.compile(r"(~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "int": (re.compile(r"[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789")),
    "float": (_FLOAT, list("-+.0123456789")),
}


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise RecipeError(
                    f"{key}: stands twice (line {node.start_mark.line + 1} on); one would win; delete one"
                )
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or ours would take for something other than a string."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Loader.yaml_implicit_resolvers = {}
for _tag, (_pattern, _first) in _CORE_SCHEMA.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def parse_yaml(text: str) -> Any:
    """The value a YAML text stands for. Raises ``RecipeError`` with the line where it is not YAML."""
    try:
        return yaml.load(text, _Loader)  # a SafeLoader: makes plain values only
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "text"
        problem = getattr(error, "problem", None) or "cannot be read"
        raise RecipeError(f"{where}: {problem}; must be YAML; correct it there or on the line above") from None


def dump_yaml(value: Any) -> str:
    """Plain values as YAML, in the order they have. ``parse_yaml`` reads them back equal."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)
