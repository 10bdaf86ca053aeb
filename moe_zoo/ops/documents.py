"""Packed rows: which tokens belong together. A row holds pieces of several documents, each begun by ``bos``.

Letters: B rows, S positions.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
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
    index = torch.arange(input_ids.shape[1], device=tokens.device)
    positions = index - torch.where(input_ids == bos_id, index, 0).cummax(dim=1).values
    targets = targets.masked_fill(targets == bos_id, IGNORED)
    return PackedRows(input_ids, targets, positions, document_mask(positions))


def padded(rows: PackedRows, multiple: int) -> PackedRows:
    """Causal rows of one document, longer by as many positions as make them a multiple; no token before sees those."""
    assert rows.mask is None
    missing = -rows.input_ids.shape[1] % multiple
    positions = torch.arange(rows.input_ids.shape[1] + missing, device=rows.input_ids.device)
    return PackedRows(
        F.pad(rows.input_ids, (0, missing)),
        F.pad(rows.targets, (0, missing), value=IGNORED),
        positions.expand(len(rows.input_ids), -1),
        None,
    )


def document_mask(positions: Tensor) -> Tensor | None:
    """(B, 1, S, S), True where a query may see a key: the same document, not later. None if causal says as much.

    ``positions`` (B, S) begin anew at 0 with each document.
    """
    begins = positions == 0
    if not bool(begins[:, 1:].any()):
        return None
    documents = begins.cumsum(dim=1)
    return (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
