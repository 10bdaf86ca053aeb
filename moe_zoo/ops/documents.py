"""Packed rows: which tokens belong together. A row holds pieces of several documents, each begun by ``bos``.

Letters: B rows, S positions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100  # a target that no loss counts; the value torch's cross-entropy ignores


class PackedRows(NamedTuple):
    """Inputs of one forward. ``mask`` is True where a query (dim 2) may see a key (dim 3); None means causal."""

    input_ids: Tensor  # (B, S)
    targets: Tensor  # (B, S), IGNORED where the next token begins another document
    positions: Tensor  # (B, S), from 0 in each document
    mask: Tensor | None  # (B, 1, S, S)


def unpack_rows(tokens: Tensor, bos_id: int) -> PackedRows:
    """Split rows of ``S + 1`` tokens into inputs and targets that respect document boundaries."""
    input_ids, targets = tokens[:, :-1], tokens[:, 1:]
    begins = input_ids == bos_id
    index = torch.arange(input_ids.shape[1], device=tokens.device)
    starts = torch.where(begins, index, 0).cummax(dim=1).values
    documents = begins.cumsum(dim=1)
    mask = None
    if bool(begins[:, 1:].any()):
        mask = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
    return PackedRows(input_ids, targets.masked_fill(targets == bos_id, IGNORED), index - starts, mask)
