"""Checks that the specifications of a model share."""

from typing import Any

from moe_zoo.spec.errors import RecipeError, did_you_mean

STRICT = {"extra": "forbid"}  # read by pydantic when a recipe holds these classes


def check_positive(spec: Any, *names: str) -> None:
    """Raise ``RecipeError`` for the first of these numbers of ``spec`` that is not."""
    for name in names:
        value = getattr(spec, name)
        if not value > 0:
            raise RecipeError(f"model {name}: {value}; must be positive; raise it")


def check_one_of(spec: Any, name: str, known: tuple[str, ...]) -> None:
    """Raise ``RecipeError`` with a suggestion if it is not."""
    value = getattr(spec, name)
    if value not in known:
        raise RecipeError(f"model {name}: {value!r}; {did_you_mean(str(value), known)}")
