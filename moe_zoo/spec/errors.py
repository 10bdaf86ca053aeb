"""Errors a user can cause. Each text is one line: ``where: value; rule; remedy``. Our own bugs are asserts instead."""

import difflib
from collections.abc import Iterable


class MoeZooError(Exception):
    """A user's mistake, told in one line. The command line prints it and exits with code 2."""


class RecipeError(MoeZooError):
    """A recipe or an architecture says something impossible."""


class PlanError(MoeZooError):
    """The recipe does not fit the world it was launched on."""


class CheckpointError(MoeZooError):
    """A checkpoint is missing, torn, altered, or belongs to another model."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The remedy for a misspelt name: the nearest known one, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
