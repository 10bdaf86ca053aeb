"""Packed rows: which tokens belong together. A row holds pieces of several documents, each begun by ``bos``.

Letters: B rows, S positions.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # a target that no loss counts; the value torch's cross-entropy ignores


class PackedRows(NamedTuple):
    """Inputs of one forward. ``mask`` is True where a query (dim 2) may see a key (dim 3); None means causal.

    For an encoder-decoder all but ``encoder_ids`` is of the decoder's part of the rows.
    """

    input_ids: Tensor  # (B, S)
    targets: Tensor  # (B, S), IGNORED where the next token begins another document
    positions: Tensor  # (B, S), from 0 in each document
    mask: Tensor | None  # (B, 1, S, S)
    encoder_ids: Tensor | None = None  # (B, encoder's S)

    @property
    def ids(self) -> Tensor | tuple[Tensor, Tensor]:
        """What a model is given."""
        return self.input_ids if self.encoder_ids is None else (self.encoder_ids, self.input_ids)

    @property
    def seq_len(self) -> int:
        """Tokens of a row, both halves together."""
        return sum(ids.shape[1] for ids in (self.encoder_ids, self.input_ids) if ids is not None)


def unpack_rows(tokens: Tensor, bos_id: int, encoder_len: int | None = None) -> PackedRows:
    """Split rows of ``S + 1`` tokens into inputs and targets that respect document boundaries.

    With ``encoder_len`` so many tokens go to an encoder and the decoder continues them, the prefix language modelling
    of T5 (arXiv:1910.10683, section 3.3.1). There documents see each other; that one begins is still no target.
    """
    if encoder_len is not None:
        rest = tokens[:, encoder_len:]
        targets = rest[:, 1:].masked_fill(rest[:, 1:] == bos_id, IGNORED)
        positions = torch.arange(targets.shape[1], device=tokens.device).expand_as(targets)
        return PackedRows(rest[:, :-1], targets, positions, None, tokens[:, :encoder_len])
    input_ids, targets = tokens[:, :-1], tokens[:, 1:]
    index = torch.arange(input_ids.shape[1], device=tokens.device)
    positions = index - torch.where(input_ids == bos_id, index, 0).cummax(dim=1).values
    targets = targets.masked_fill(targets == bos_id, IGNORED)
    return PackedRows(input_ids, targets, positions, document_mask(positions))


def padded(rows: PackedRows, multiple: int) -> PackedRows:
    """Causal rows of one document, longer by as many positions as make them a multiple; no token before sees those.

    What an encoder reads is left as it is.
    """
    assert rows.mask is None
    missing = -rows.input_ids.shape[1] % multiple
    positions = torch.arange(rows.input_ids.shape[1] + missing, device=rows.input_ids.device)
    return PackedRows(
        F.pad(rows.input_ids, (0, missing)),
        F.pad(rows.targets, (0, missing), value=IGNORED),
        positions.expand(len(rows.input_ids), -1),
        None,
        rows.encoder_ids,
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
