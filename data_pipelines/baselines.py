"""What counting achieves: uniform, unigram and bigram losses on the rows a trainer evaluates."""

import json
import logging
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipelines.errors import DataError
from data_pipelines.shards import ShardReader, read_token_bytes
from data_pipelines.store import Store, open_store

log = logging.getLogger(__name__)
DISCOUNT = 0.75  # absolute discounting; Ney, Essen, Kneser 1994 find 0.7 to 0.8 for bigrams
ROWS_AT_ONCE = 1 << 14


class Score(NamedTuple):
    nats_per_token: float
    bits_per_byte: float


class Baselines(NamedTuple):
    """Losses on ``num_targets`` predicted tokens, which stand for ``num_bytes`` bytes of text."""

    uniform: Score
    unigram: Score
    bigram: Score
    num_targets: int
    num_bytes: int


class _Pairs(NamedTuple):
    """How often each (previous, next) pair occurs; ``keys = previous * vocab_size + next``, sorted."""

    keys: NDArray[np.int64]
    counts: NDArray[np.int64]


def ngram_baselines(url: str | Path, valid_limit: int | None = None) -> Baselines:
    """Fit on the whole train split, score on the first ``valid_limit`` rows of valid; kept beside the data.

    Targets are all tokens but bos: where a new document begins is not predicted. The bigram takes ``DISCOUNT`` off each
    count and backs off to the unigram, which adds one to each count.
    """
    store = open_store(url)
    train, valid = ShardReader(store, "train"), ShardReader(store, "valid")
    limit = min(valid_limit or valid.index.num_rows, valid.index.num_rows)
    name = f"baselines-{limit}.json"
    if (raw := store.read(name)) is not None:
        kept = json.loads(raw)
        if kept.pop("fingerprint") == train.index.fingerprint:
            return Baselines(**(kept | {name: Score(*kept[name]) for name in ("uniform", "unigram", "bigram")}))
    result = _measure(_count(train, train.index.num_rows), _count(valid, limit), train, store)
    _keep(store, name, result._asdict() | {"fingerprint": train.index.fingerprint})
    return result


def _count(reader: ShardReader, num_rows: int) -> _Pairs:
    """Every pair whose second token is a target."""
    found = []
    for first in range(0, num_rows, ROWS_AT_ONCE):
        rows = reader.rows(np.arange(first, min(first + ROWS_AT_ONCE, num_rows)))
        keys = rows[:, :-1] * reader.index.vocab_size + rows[:, 1:]
        found.append(np.unique(keys[rows[:, 1:] != reader.index.bos_id], return_counts=True))
    keys, inverse = np.unique(np.concatenate([k for k, _ in found]), return_inverse=True)
    return _Pairs(keys, np.bincount(inverse, np.concatenate([c for _, c in found])).astype(np.int64))


def _measure(train: _Pairs, valid: _Pairs, reader: ShardReader, store: Store) -> Baselines:
    vocab_size = reader.index.vocab_size
    before, target = np.divmod(valid.keys, vocab_size)
    num_targets = int(valid.counts.sum())
    if not num_targets:
        raise DataError(f"{store.url}/valid: no targets; every token of the rows asked for is bos; prepare more text")
    num_bytes = int((read_token_bytes(store, reader.index)[target] * valid.counts).sum())

    def score(probability: NDArray[np.float64]) -> Score:
        nats = float(-(np.log(probability) * valid.counts).sum())
        return Score(nats / num_targets, float(nats / np.log(2)) / max(num_bytes, 1))

    unigram = _unigram(train, vocab_size)
    bigram = _bigram(train, unigram, vocab_size, before, target)
    uniform = np.full(len(target), 1 / vocab_size)
    return Baselines(score(uniform), score(unigram[target]), score(bigram), num_targets, num_bytes)


def _unigram(train: _Pairs, vocab_size: int) -> NDArray[np.float64]:
    """(vocab_size,) probability of each target, one added to each count."""
    counts = np.bincount(train.keys % vocab_size, train.counts, vocab_size) + 1
    return counts / counts.sum()


def _bigram(train: _Pairs, unigram: NDArray, vocab_size: int, before: NDArray, target: NDArray) -> NDArray[np.float64]:
    """P(target | before) for each pair asked about."""
    history = train.keys // vocab_size
    total = np.bincount(history, train.counts, vocab_size)[before]
    kinds = np.bincount(history, minlength=vocab_size)[before]
    asked = before * vocab_size + target
    at = np.minimum(np.searchsorted(train.keys, asked), len(train.keys) - 1)
    count = np.where(train.keys[at] == asked, train.counts[at], 0)
    seen = np.maximum(total, 1)
    discounted = np.maximum(count - DISCOUNT, 0) / seen + DISCOUNT * kinds / seen * unigram[target]
    return np.where(total > 0, discounted, unigram[target])


def _keep(store: Store, name: str, result: dict) -> None:
    try:
        store.write(name, (json.dumps(result, indent=1) + "\n").encode())
    except (PermissionError, DataError) as error:  # a shared data set may be read-only: count again next time
        log.warning("%s not kept: %s", name, error)
