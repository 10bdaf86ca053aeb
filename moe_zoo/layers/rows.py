"""Where the tokens of a row lie, for layers that look at whole rows: capacity, expert choice, noise.

Letters: B rows, S positions on this rank.
"""

from typing import Protocol

import torch
from torch import Tensor


class RowShare(Protocol):
    """This rank's part of each row. Context and tensor parallelism split rows; layers see no more of it than this."""

    def places(self, num_local: int, device: torch.device) -> Tensor:
        """(S,) place of each local token in its row."""
        ...

    def gathered(self, x_BS: Tensor) -> Tensor:
        """(B, S, ...) of this rank -> the same of the whole row, in row order, without padding. No gradient."""
        ...


class WholeRows:
    """Rows that are not split."""

    def places(self, num_local: int, device: torch.device) -> Tensor:
        return torch.arange(num_local, device=device)

    def gathered(self, x_BS: Tensor) -> Tensor:
        return x_BS.detach()
