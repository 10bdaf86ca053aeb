"""What a step is given: rows, and the sizes by which every local term is divided."""

from typing import NamedTuple

from torch import Tensor

from moe_zoo.ops.documents import PackedRows


class MicroBatch(NamedTuple):
    """Rows of one forward on this rank, and the seeds of their jitter (None: no jitter)."""

    rows: PackedRows
    row_seeds: Tensor | None = None


class StepScale(NamedTuple):
    """Sizes of the global batch: what every local term is divided by."""

    num_targets: int
    total_tokens: int
    seq_len: int
    global_rows: int
    micro_batches: int
