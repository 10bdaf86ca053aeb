"""A first look at a model's weights: does it know language at all?"""

import math
from typing import NamedTuple

import torch

from moe_zoo.models.hub import load
from moe_zoo.models.source import Source
from moe_zoo.models.tokenizer import check_ids, read_tokenizer
from moe_zoo.spec.errors import MoeZooError
from moe_zoo.spec.presets import is_preset

# Ours, and in nobody's training data word by word: prose, then code.
SAMPLE = """\
The keeper of the zoo walks past the cages every morning before the visitors come. She counts the animals, looks whether
each of them has eaten, and writes down what is new. On most days nothing is new, and that is good news.

def count_animals(cages):
    total = 0
    for cage in cages:
        total += len(cage.animals)
    return total
"""
TRAINED = 0.9  # of the loss of guessing: a model below it has learnt something
MOST_TOKENS = 2048  # of a text are read: one row, whose attention grows with its square
WORSE = 1.1  # above it weights and tokenizer, or weights and configuration, do not belong together


class FirstLoss(NamedTuple):
    """What ``check`` found, in nats per token."""

    model: str
    loss: float
    guessing: float  # of a model that gives every token of its vocabulary the same probability
    tokens: int

    @property
    def verdict(self) -> str:
        """trained, untrained or wrong."""
        share = self.loss / self.guessing
        return "trained" if share < TRAINED else "untrained" if share <= WORSE else "wrong"


@torch.no_grad()
def first_loss(name: str, text: str | None = None, tokenizer: str | None = None) -> FirstLoss:
    """Mean loss of a model on ``text``. Raises ``MoeZooError`` if there is no tokenizer to read it with."""
    if is_preset(name):
        raise MoeZooError(f"check: {name}; a preset has no weights to check; give a folder or a Hub id")
    source = Source(name)
    reader = read_tokenizer(tokenizer or str(source.folder))
    model = load(name)
    read = list(reader(SAMPLE if text is None else text)["input_ids"])
    if len(read) < 2:
        raise MoeZooError(f"check: the text is {len(read)} tokens; a loss needs at least two; give a longer one")
    vocab_size = model.model.architecture.vocab_size
    ids = torch.tensor([check_ids(read[:MOST_TOKENS], vocab_size, f"check: {name}")])
    return FirstLoss(name, model(ids, labels=ids).loss.item(), math.log(vocab_size), ids.shape[1])
