"""The stored format: little-endian rows in shards, cut in blocks of about 1 MiB, and one index per split.

A row is ``seq_len + 1`` token ids. Row r lies in block ``r // rows_per_block``, block b in shard
``b // blocks_per_shard``: every address follows from the index's numbers.
"""

import io
import json
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from data_pipelines.errors import DataError, StreamError
from data_pipelines.store import Block, Store

TOKEN_BYTES = "token_bytes.npy"
FORMAT = "moe-zoo rows 1"
FETCH_THREADS = 4


@dataclass(frozen=True)
class Shard:
    """One file: its name beside the index, its size, its hash and the hashes of its blocks (xxh3_128, hex)."""

    name: str
    rows: int
    size: int
    digest: str
    blocks: list[str]


@dataclass(frozen=True)
class ShardIndex:
    """What ``index.json`` says about a split."""

    dtype: str  # "<u2" or "<u4"
    seq_len: int
    vocab_size: int
    bos_id: int
    eos_id: int
    num_rows: int
    num_tokens: int  # predicted tokens: num_rows * seq_len
    num_bytes: int  # of text that the predicted tokens stand for
    rows_per_block: int
    blocks_per_shard: int
    fingerprint: str  # of the preparation: spec, tokenizer, corpus
    token_bytes_digest: str
    shards: list[Shard]

    @property
    def row_bytes(self) -> int:
        return (self.seq_len + 1) * np.dtype(self.dtype).itemsize

    def block(self, number: int, folder: str) -> Block:
        """Where block ``number`` of the split lies."""
        at, inside = divmod(number, self.blocks_per_shard)
        shard, offset = self.shards[at], inside * self.rows_per_block * self.row_bytes
        size = min(self.rows_per_block * self.row_bytes, shard.size - offset)
        return Block(f"{folder}/{shard.name}", inside, offset, size, shard.blocks[inside])

    def to_json(self) -> bytes:
        body = {"format": FORMAT} | asdict(self)
        return (json.dumps(body | {"digest": _digest(body)}, indent=1) + "\n").encode()


def _digest(body: dict) -> str:
    return xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def read_index(store: Store, split: str) -> ShardIndex:
    """The index of a finished preparation, or why there is none."""
    where = f"{store.url}/{split}/index.json"
    raw = store.read(f"{split}/index.json")
    if raw is None:
        raise DataError(
            f"{store.url}: no {split}/index.json; a stream reads a finished preparation; "
            f"check the path, or run data_pipelines.prepare to the end"
        )
    try:
        body = json.loads(raw)
        digest = body.pop("digest")
    except (ValueError, KeyError, AttributeError) as error:
        raise StreamError(f"{where}: not an index; it is torn or altered; restore it, or prepare again") from error
    if body.get("format") != FORMAT:
        raise StreamError(f"{where}: format {body.get('format')!r}; this version reads {FORMAT!r}; prepare again")
    if digest != _digest(body):
        raise StreamError(f"{where}: altered since it was written; its hash differs; restore it, or prepare again")
    del body["format"]
    return ShardIndex(**(body | {"shards": [Shard(**shard) for shard in body["shards"]]}))


def read_token_bytes(store: Store, index: ShardIndex) -> NDArray[np.int64]:
    """(vocab_size,) bytes of text that each token id stands for."""
    raw = store.read(TOKEN_BYTES)
    if raw is None or xxh3_128_hexdigest(raw) != index.token_bytes_digest:
        problem = "missing" if raw is None else "altered"
        raise StreamError(
            f"{store.url}/{TOKEN_BYTES}: {problem}; the index holds its hash; restore it, or prepare again"
        )
    return np.load(io.BytesIO(raw))


def encode_shard(name: str, rows: NDArray, rows_per_block: int) -> tuple[Shard, memoryview]:
    """The bytes of a shard and its line in the index. ``rows`` (n, seq_len + 1), in the stored dtype."""
    data = np.ascontiguousarray(rows).data.cast("B")
    step = rows_per_block * rows.shape[1] * rows.itemsize
    blocks = [xxh3_128_hexdigest(data[at : at + step]) for at in range(0, len(data), step)]
    return Shard(name, len(rows), len(data), xxh3_128_hexdigest(data), blocks), data


class ShardReader:
    """Rows of a split by id. Reads whole blocks, verifies each, and keeps the last ``keep_blocks`` in memory."""

    def __init__(self, store: Store, split: str, keep_blocks: int = 20):
        self.index = read_index(store, split)
        self._store, self._split, self._keep_blocks = store, split, keep_blocks
        self._blocks: OrderedDict[int, NDArray] = OrderedDict()

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n,) row ids -> (n, seq_len + 1) tokens."""
        out = np.empty((len(ids), self.index.seq_len + 1), dtype=np.int64)
        number = ids // self.index.rows_per_block
        for group in _groups(np.unique(number).tolist(), self._keep_blocks):
            self._load(group)
            for block in group:
                here = number == block
                out[here] = self._blocks[block][ids[here] - block * self.index.rows_per_block]
        return out

    def _load(self, numbers: list[int]) -> None:
        missing = [n for n in numbers if n not in self._blocks]
        for n, block in zip(missing, self._read(missing), strict=True):
            self._blocks[n] = block
        for n in numbers:
            self._blocks.move_to_end(n)
        while len(self._blocks) > self._keep_blocks:
            self._blocks.popitem(last=False)

    def _read(self, numbers: list[int]) -> Iterable[NDArray]:
        if not self._store.is_remote or len(numbers) < 2:
            return [self._read_block(n) for n in numbers]
        with ThreadPoolExecutor(FETCH_THREADS) as pool:
            return list(pool.map(self._read_block, numbers))

    def _read_block(self, number: int) -> NDArray:
        data = self._store.read_block(self.index.block(number, self._split))
        return np.frombuffer(data, dtype=self.index.dtype).reshape(-1, self.index.seq_len + 1)


def _groups(numbers: list[int], size: int) -> Iterable[list[int]]:
    return (numbers[at : at + size] for at in range(0, len(numbers), size))
