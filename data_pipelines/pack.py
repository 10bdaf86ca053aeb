"""Packing: one long line of token ids -> overlapping rows, shuffled once, in shards."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipelines.jobs import Workers
from data_pipelines.order import derive_key, shuffle
from data_pipelines.shards import Shard, encode_shard
from data_pipelines.store import open_store


class Line(NamedTuple):
    """All ids of a split, one document after the other, and how they become rows."""

    ids: Path
    dtype: str
    seq_len: int
    split: str
    seed: int

    @property
    def num_rows(self) -> int:
        """Row i holds ids ``i * seq_len ... (i + 1) * seq_len``; what does not fill a row is left out."""
        return max(0, self.ids.stat().st_size // np.dtype(self.dtype).itemsize - 1) // self.seq_len

    def stored_rows(self, first: int, size: int) -> NDArray:
        """(size, seq_len + 1): the rows stored at places ``first ...``, in the shuffled order."""
        ids = np.memmap(self.ids, dtype=self.dtype, mode="r")
        key = derive_key(self.seed, "stored", self.split)
        row = shuffle(np.arange(first, first + size), self.num_rows, key)
        return ids[row[:, None] * self.seq_len + np.arange(self.seq_len + 1)]


def pack(
    line: Line,
    output: str,
    rows_per_block: int,
    blocks_per_shard: int,
    token_bytes: NDArray[np.int64],
    workers: Workers,
    done: Callable[[int, int], None],
) -> tuple[list[Shard], int]:
    """Write all shards; their lines of the index, and how many bytes of text the rows predict."""
    step = rows_per_block * blocks_per_shard
    starts = range(0, line.num_rows, step)
    jobs = [(line, output, at, min(step, line.num_rows - at), rows_per_block, at // step, token_bytes) for at in starts]
    shards, num_bytes = [], 0
    for shard, shard_bytes in workers.map(_write_shard, jobs):
        shards.append(shard)
        num_bytes += shard_bytes
        done(len(shards), len(jobs))
    return shards, num_bytes


def _write_shard(
    line: Line, output: str, first: int, size: int, rows_per_block: int, number: int, token_bytes: NDArray[np.int64]
) -> tuple[Shard, int]:
    rows = line.stored_rows(first, size)
    shard, data = encode_shard(f"shard-{number:05d}.bin", rows, rows_per_block)
    open_store(output).write(f"{line.split}/{shard.name}", data)
    return shard, int(token_bytes[rows[:, 1:]].sum())
