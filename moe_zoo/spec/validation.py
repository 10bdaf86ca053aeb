"""Plain values checked against a pydantic model; what is wrong is told in one line, not in pydantic's many."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from moe_zoo.spec.errors import RecipeError, did_you_mean

Model = TypeVar("Model", bound=BaseModel)
Path = tuple[str | int, ...]

_RULES = {  # pydantic's error type: (rule, remedy)
    "missing": ("every recipe needs it", "add it"),
    "greater_than": ("must be above {gt:g}", "raise it"),
    "greater_than_equal": ("must be at least {ge:g}", "raise it"),
    "less_than": ("must be below {lt:g}", "lower it"),
    "less_than_equal": ("must be at most {le:g}", "lower it"),
    "literal_error": ("must be {expected}", "choose one"),
    "int_type": ("must be a whole number", "write it as one, without quotes"),
    "int_from_float": ("must be a whole number", "write it as one, without quotes"),
    "float_type": ("must be a number", "write it as one, without quotes"),
    "bool_type": ("must be true or false", "write one of them, without quotes"),
    "string_type": ("must be text", "put it in quotes"),
    "string_too_short": ("must not be empty", "fill it in"),
    "string_pattern_mismatch": ("may hold letters, digits and . _ -, and starts with no sign", "rename it"),
    "finite_number": ("must be finite", "write a number"),
}


def validate(model: type[Model], values: Mapping[str, Any]) -> Model:
    """``values`` as a ``model``, without coercion. Raises ``RecipeError`` for the first thing that is wrong."""
    try:
        # JSON, because pydantic's strict mode takes a list for a tuple and a mapping for a dataclass only there.
        return model.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        raise RecipeError(_one_line(model, values, error.errors(include_url=False))) from None


def _one_line(model: type[BaseModel], values: Mapping[str, Any], errors: Sequence[ErrorDetails]) -> str:
    for error in errors:  # a misspelt key is also a missing one: name the misspelling
        if error["type"] == "extra_forbidden" or error["type"] == "unexpected_keyword_argument":
            path = error["loc"]
            known = _keys_at(model, path[:-1])
            return f"{_dotted(path)}: unknown key; {did_you_mean(str(path[-1]), known)}"
    path = _written(errors[0]["loc"], values)
    same = [error for error in errors if _written(error["loc"], values) == path]  # one per member of a union
    rules = [_rule(error) for error in same]
    rule = " or ".join(dict.fromkeys(rule for rule, _ in rules)).replace(" or must be ", " or ")
    value = "missing" if errors[0]["type"] in ("missing", "missing_argument") else _shown(errors[0]["input"])
    return f"{_dotted(path)}: {value}; {rule}; {rules[0][1]}"


def _rule(error: ErrorDetails) -> tuple[str, str]:
    kind = error["type"].removesuffix("_argument")
    if kind in ("model_type", "model_attributes_type", "dataclass_type", "dict_type"):
        return "must be a group of keys", "indent its keys below it"
    if kind in ("tuple_type", "too_long") or (kind == "missing" and isinstance(error["loc"][-1], int)):
        return "must be a list of two", "write it like [0.9, 0.95]"
    rule, remedy = _RULES.get(kind, (error["msg"][:1].lower() + error["msg"][1:], "change it"))
    return rule.format(**error.get("ctx", {})), remedy


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _dotted(path: Path) -> str:
    return ".".join(map(str, path)) or "recipe"


def _written(path: Path, values: Any) -> Path:
    """The part of pydantic's ``path`` a person wrote: it appends the names of a union's members."""
    for depth, key in enumerate(path):
        if isinstance(values, list) and isinstance(key, int) and key < len(values):
            values = values[key]
        elif isinstance(values, Mapping):
            values = values.get(key)
        else:
            return path[:depth]
    return path


def _keys_at(model: type[BaseModel], path: Path) -> list[str]:
    """The keys allowed in the group at ``path``, read from the model's schema."""
    schema = model.model_json_schema()
    node = schema
    for key in path:
        node = _group(schema, node)["properties"][key]
    return list(_group(schema, node)["properties"])


def _group(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    for option in (node, *node.get("anyOf", ()), *node.get("allOf", ())):
        if "$ref" in option:
            return dict(schema["$defs"][option["$ref"].split("/")[-1]])
    return node
