"""Placement: which slice of which whole parameter a local tensor is, and which ranks hold the same one."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """A slice along dimension 0. ``kind`` names the replica group in ``Mesh.replicas``."""

    name: str  # in the whole model
    shape: tuple[int, ...]  # of the whole parameter
    kind: str  # "stage": whole; "ep": a run of experts
    parts: int = 1
    index: int = 0  # this rank holds slice ``index`` of ``parts``

    @property
    def rows(self) -> int:
        """Length of dimension 0 of the slice."""
        return self.shape[0] // self.parts

    @property
    def start(self) -> int:
        """Where the slice begins in the flattened whole parameter; a slice along dimension 0 is one run of it."""
        return self.index * self.numel

    @property
    def numel(self) -> int:
        """Elements of the slice."""
        return math.prod(self.shape) // self.parts
