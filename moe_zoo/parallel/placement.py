"""Placement: which slice of which whole parameter a local tensor is, and which ranks hold the same one."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor


class Cut(NamedTuple):
    """Dimension ``dim`` is ``blocks`` equal blocks, such as gate and up; of each, slice ``index`` of ``parts`` is here."""

    dim: int
    parts: int
    index: int
    blocks: int = 1


Slices = dict[str, tuple[str, tuple[Cut, ...]]]  # parameter name -> (kind, cuts)


@dataclass(frozen=True, slots=True)
class Placement:
    """A slice of a whole parameter. ``kind`` names its replica group in ``Mesh.replicas``.

    Slices keep the order of the whole: of two local elements, the earlier one stands earlier there too.
    """

    name: str  # in the whole model
    shape: tuple[int, ...]  # of the whole parameter
    kind: str
    cuts: tuple[Cut, ...] = ()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        shape = list(self.shape)
        for cut in self.cuts:
            shape[cut.dim] //= cut.parts
        return tuple(shape)

    @property
    def numel(self) -> int:
        """Elements of the slice."""
        return math.prod(self.local_shape)

    @property
    def run(self) -> int | None:
        """Where the slice begins in the flattened whole, if it is one run of it."""
        if not self.cuts:
            return 0
        is_run = len(self.cuts) == 1 and self.cuts[0].dim == 0 and self.cuts[0].blocks == 1
        return self.cuts[0].index * self.numel if is_run else None

    def take(self, whole: Tensor) -> Tensor:
        """The slice of a whole tensor."""
        assert whole.shape == self.shape, (self, whole.shape)
        for cut in self.cuts:
            whole = take(whole, cut)
        return whole

    def whole_index(self, local: np.ndarray) -> np.ndarray:
        """Flat indices in the slice -> flat indices in the whole."""
        places = list(np.unravel_index(local, self.local_shape))
        for cut in self.cuts:
            size = self.shape[cut.dim] // cut.blocks // cut.parts
            block, inside = np.divmod(places[cut.dim], size)
            places[cut.dim] = (block * cut.parts + cut.index) * size + inside
        return np.ravel_multi_index(places, self.shape)

    def local_index(self, whole: np.ndarray) -> np.ndarray:
        """Flat indices in the whole -> flat indices in the slice, -1 for what it does not hold."""
        places, is_here = list(np.unravel_index(whole, self.shape)), np.ones(len(whole), bool)
        for cut in self.cuts:
            size = self.shape[cut.dim] // cut.blocks // cut.parts
            part, inside = np.divmod(places[cut.dim], size)
            block, index = np.divmod(part, cut.parts)
            is_here &= index == cut.index
            places[cut.dim] = block * size + inside
        return np.where(is_here, np.ravel_multi_index(places, self.local_shape), -1)


def take(whole: Tensor, cut: Cut) -> Tensor:
    """One cut of a tensor."""
    parts = whole.unflatten(cut.dim, (cut.blocks, cut.parts, -1))
    return parts.select(cut.dim + 1, cut.index).flatten(cut.dim, cut.dim + 1)


def run_margins(width: int, parts: int, index: int) -> tuple[int, int]:
    """What lies before and behind one of equal runs."""
    size = width // parts
    return index * size, width - (index + 1) * size
