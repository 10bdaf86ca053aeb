"""The training stream: batches whose content depends on (seed, position) alone, never on who reads them.

A global batch is a set of rows fixed by (seed, position). Sorted by storage address it is cut in micro-batches first
and ranks second, so micro-batch m holds the same rows in every layout and a rank reads few blocks.
"""

import os
import queue
import threading
import time
import weakref
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from data_pipelines.errors import DataError, StreamError
from data_pipelines.order import RowOrder
from data_pipelines.shards import ShardReader, read_token_bytes
from data_pipelines.store import open_store

WINDOW_BLOCKS = 16  # part of the order: another number breaks every run that resumes
ROWS_AHEAD = 1 << 13
CLOSE_S = 5.0


class RowBatch(NamedTuple):
    """This rank's share of one global batch."""

    tokens: NDArray[np.int64]  # (micro_batches, rows, seq_len + 1)
    rows: NDArray[np.int64]  # (micro_batches, rows): each row's place in the global batch


class StreamState(NamedTuple):
    """All there is to save: rows consumed since the start of training, and the seed of their order."""

    position: int
    seed: int


class TokenStream:
    """Endless batches of a prepared split, read ahead by one thread. Epochs follow each other without a gap."""

    def __init__(
        self,
        url: str | Path,
        split: str = "train",
        *,
        seed: int = 0,
        global_batch: int,
        micro_batches: int = 1,
        dp: int = 1,
        dp_rank: int = 0,
        position: int = 0,
        cache_dir: str | Path | None = None,
        prefetch: int = 2,
    ):
        _check(global_batch, micro_batches, dp, dp_rank, position)
        store = open_store(url, cache_dir)
        reader = ShardReader(store, split, keep_blocks=WINDOW_BLOCKS + 4)
        index = reader.index
        self.seq_len, self.vocab_size, self.num_rows = index.seq_len, index.vocab_size, index.num_rows
        self.bos_id, self.eos_id = index.bos_id, index.eos_id
        self.fingerprint = index.fingerprint
        self.token_bytes = read_token_bytes(store, index)
        self.position, self.seed = position, seed
        self._global_batch, self._url, self._pid = global_batch, str(url), os.getpid()
        order = RowOrder(seed, index.num_rows, WINDOW_BLOCKS * index.rows_per_block)
        share = _Share(reader, order, global_batch, micro_batches, dp, dp_rank)
        self._ready: queue.Queue[RowBatch | Exception] = queue.Queue(max(1, prefetch))
        self._failure: Exception | None = None
        stop = threading.Event()
        thread = threading.Thread(target=_read_ahead, args=(share, position, self._ready, stop), daemon=True)
        self._stop = weakref.finalize(self, _end, stop, self._ready, thread)  # also when the stream is just dropped
        thread.start()

    @property
    def state(self) -> StreamState:
        return StreamState(self.position, self.seed)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RowBatch:
        if os.getpid() != self._pid:
            raise StreamError(
                f"{self._url}: stream used in a forked child; its thread stayed in the parent; "
                f"open a stream in each process"
            )
        if not self._stop.alive:
            raise StreamError(f"{self._url}: stream is closed; a closed stream has no batches; open another")
        if self._failure is None:
            item = self._ready.get()
            if isinstance(item, RowBatch):
                self.position += self._global_batch
                return item
            self._failure = item
        raise self._failure

    def close(self) -> None:
        self._stop()


def valid_rows(url: str | Path, split: str = "valid", limit: int | None = None) -> NDArray[np.int64]:
    """(n, seq_len + 1): the first ``limit`` rows as stored, the same on every rank."""
    reader = ShardReader(open_store(url), split)
    count = reader.index.num_rows if limit is None else min(limit, reader.index.num_rows)
    return reader.rows(np.arange(count))


def _check(global_batch: int, micro_batches: int, dp: int, dp_rank: int, position: int) -> None:
    if min(global_batch, micro_batches, dp) < 1 or global_batch % (micro_batches * dp):
        raise DataError(
            f"stream.global_batch: {global_batch}; must be a multiple of micro_batches * dp = {micro_batches} * {dp}; "
            f"change one of them"
        )
    if not 0 <= dp_rank < dp:
        raise DataError(f"stream.dp_rank: {dp_rank}; ranks count from 0 to dp - 1 = {dp - 1}; change it")
    if position < 0:
        raise DataError(f"stream.position: {position}; counts the rows consumed; must not be negative; change it")


class _Share:
    """Which rows this rank takes of the global batch at a position."""

    def __init__(
        self, reader: ShardReader, order: RowOrder, global_batch: int, micro_batches: int, dp: int, dp_rank: int
    ):
        self.reader, self.order, self.global_batch = reader, order, global_batch
        places = np.arange(global_batch).reshape(micro_batches, dp, -1)
        self.places = np.ascontiguousarray(places[:, dp_rank])  # (micro_batches, rows)
        self._known, self._known_from = np.empty(0, dtype=np.int64), 0  # row ids ahead: many at once cost little more

    def batch(self, position: int) -> RowBatch:
        ids = np.sort(self._rows_at(position))[self.places]
        tokens = self.reader.rows(ids.reshape(-1))
        return RowBatch(tokens.reshape(*ids.shape, -1), self.places.copy())

    def _rows_at(self, position: int) -> NDArray[np.int64]:
        first = position - self._known_from
        if not 0 <= first <= len(self._known) - self.global_batch:
            batches = max(1, ROWS_AHEAD // self.global_batch)
            self._known, self._known_from = self.order.rows(position, batches * self.global_batch), position
            first = 0
        return self._known[first : first + self.global_batch]


def _read_ahead(share: _Share, position: int, ready: queue.Queue, stop: threading.Event) -> None:
    """Fill the queue until told to stop; an exception is the last item."""
    try:
        while not stop.is_set():
            ready.put(share.batch(position))
            position += share.global_batch
    except Exception as error:  # it belongs to the thread that asks for the next batch
        ready.put(error)


def _end(stop: threading.Event, ready: queue.Queue, thread: threading.Thread) -> None:
    """Stop the reading thread: it may wait for room in the queue, or for a server; the latter is left to end alone."""
    stop.set()
    if thread is threading.current_thread():  # the collector of garbage runs in any thread, this one too
        return
    deadline = time.monotonic() + CLOSE_S
    while thread.is_alive() and time.monotonic() < deadline:
        try:
            ready.get_nowait()
        except queue.Empty:
            thread.join(timeout=0.01)
