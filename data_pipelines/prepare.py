"""Preparation: a corpus -> tokens -> shuffled rows in shards, with an index written last.

Documents become ``bos tokens eos``, stand one after the other, and are cut in rows that overlap by one token: row i
holds tokens ``i * seq_len ... (i + 1) * seq_len``, so every token is predicted once. Rows are shuffled once here.
"""

import fcntl
import io
import itertools
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_128_hexdigest

from data_pipelines.corpus import documents
from data_pipelines.errors import DataError
from data_pipelines.jobs import Workers, worker_count
from data_pipelines.pack import Line, pack
from data_pipelines.parts import SPLITS, Part, cut_parts, join_parts, stored_dtype, tokenize_parts
from data_pipelines.shards import FORMAT, TOKEN_BYTES, ShardIndex
from data_pipelines.store import LocalStore, Store, open_store
from data_pipelines.tokenizer import SUMS, Tokenizer, load_tokenizer, read_sums

log = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]  # (stage, done, total)
LIMITS = {
    "seq_len": (1, 1 << 20),
    "heldout_percent": (0, 50),
    "shard_mib": (1, 4096),
    "block_kib": (1, 1 << 16),
    "seed": (0, 1 << 63),
    "workers": (0, 4096),
}
REQUEST, SUMMARY = "request.json", "prepared.json"


@dataclass(frozen=True)
class PrepareSpec:
    source: str | Path  # "stdlib", a folder, or a .jsonl(.gz) file
    tokenizer: str | Path  # a folder of tokenizers/
    output: str | Path  # a folder or s3://bucket/prefix
    seq_len: int
    heldout_percent: int = 5
    shard_mib: int = 8
    block_kib: int = 1024  # what a reader fetches and verifies at once; less only pays for tiny sets
    seed: int = 0
    workers: int = 0  # processes; 0: as many as pay
    work: str | Path | None = None  # local scratch; None: inside a local output, else under ~/.cache


class PreparedSummary(NamedTuple):
    url: str
    fingerprint: str
    num_documents: int
    train_rows: int
    valid_rows: int
    train_tokens: int
    valid_tokens: int
    bytes_per_token: float  # of the train split


def prepare(spec: PrepareSpec, progress: Progress | None = None) -> PreparedSummary:
    """Bring ``spec.output`` to a finished preparation: at once if it is one, from where it stopped if it was begun."""
    _check(spec)
    report = progress or (lambda stage, done, total: None)
    tokenizer, store = load_tokenizer(spec.tokenizer), open_store(spec.output)
    parts = [part for part, _ in cut_parts(documents(spec.source), spec.heldout_percent)]
    request = _request(spec, tokenizer, parts)
    fingerprint = blake2b(json.dumps(request).encode(), digest_size=16).hexdigest()
    _refuse_another(store, request)
    with _work_folder(spec, store, fingerprint) as work:
        if (raw := store.read(SUMMARY)) is not None:
            return PreparedSummary(**(json.loads(raw) | {"url": store.url}))
        store.write(REQUEST, _as_json(request))
        with Workers(worker_count(spec.workers, len(parts))) as workers:
            return _Run(spec, tokenizer, store, parts, fingerprint, work, workers, report).all()


def _check(spec: PrepareSpec) -> None:
    for name, (low, high) in LIMITS.items():
        value = getattr(spec, name)
        if type(value) is not int or not low <= value <= high:
            raise DataError(f"prepare.{name}: {value!r}; a whole number from {low} to {high}; change it")


def _request(spec: PrepareSpec, tokenizer: Tokenizer, parts: list[Part]) -> dict:
    """What decides the output's bytes; where the corpus lies and how many workers there are do not."""
    corpus = blake2b("\n".join(p.file_name + p.digest for p in parts).encode(), digest_size=16).hexdigest()
    numbers = {name: getattr(spec, name) for name in ("seq_len", "heldout_percent", "shard_mib", "block_kib", "seed")}
    return {"format": FORMAT, **numbers, "tokenizer": tokenizer.sha256[:32], "corpus": corpus}


def _refuse_another(store: Store, request: dict) -> None:
    if (raw := store.read(REQUEST)) is None:
        return
    before = json.loads(raw)
    for name in before | request:
        if before.get(name) != request.get(name):
            raise DataError(
                f"prepare.output: {store.url} was prepared with {name} {before.get(name)}, now {request.get(name)}; "
                f"one folder holds one preparation; choose another output, or delete this one"
            )


@contextmanager
def _work_folder(spec: PrepareSpec, store: Store, fingerprint: str) -> Iterator[Path]:
    """Scratch for unfinished work, held by one process at a time and removed when the work is finished."""
    if spec.work is not None:
        work = Path(spec.work) / fingerprint
    elif isinstance(store, LocalStore):
        work = store.root / ".work"
    else:
        work = Path.home() / ".cache" / "moe-zoo" / "prepare" / fingerprint
    try:
        work.mkdir(parents=True, exist_ok=True)
        (work / "lock").touch()
    except OSError as error:
        raise DataError(f"{work}: {error.strerror}; preparation writes there; choose another output or work") from error
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting: another process prepares %s", store.url)
            fcntl.flock(lock, fcntl.LOCK_EX)
        work.mkdir(parents=True, exist_ok=True)  # the one we waited for removed it
        yield work
        shutil.rmtree(work)


@dataclass(frozen=True)
class _Run:
    """One preparation: what all its stages need."""

    spec: PrepareSpec
    tokenizer: Tokenizer
    store: Store
    parts: list[Part]
    fingerprint: str
    work: Path
    workers: Workers
    report: Progress

    def all(self) -> PreparedSummary:
        self._tokenize()
        digest = self._write_tokenizer()
        splits = [split for split in SPLITS if split == "train" or self.spec.heldout_percent]
        indexes = {split: self._write_split(split, digest) for split in splits}
        for split, index in indexes.items():
            self.store.write(f"{split}/index.json", index.to_json())
        summary = self._summary(indexes["train"], indexes.get("valid"))
        self.store.write(SUMMARY, _as_json(summary._asdict()))
        return summary

    def _tokenize(self) -> None:
        done = itertools.count(1)
        corpus = cut_parts(documents(self.spec.source), self.spec.heldout_percent)
        tokenize_parts(
            corpus,
            self.tokenizer,
            self.work,
            self.workers,
            done=lambda: self.report("tokenize", next(done), len(self.parts)),
        )

    def _write_tokenizer(self) -> str:
        """A prepared set is self-contained: it carries its tokenizer and the bytes each token stands for."""
        folder = self.tokenizer.folder
        for name in (*read_sums(folder), SUMS):
            self.store.write(f"tokenizer/{name}", (folder / name).read_bytes())
        buffer = io.BytesIO()
        np.save(buffer, self.tokenizer.token_bytes)
        self.store.write(TOKEN_BYTES, buffer.getvalue())
        return xxh3_128_hexdigest(buffer.getvalue())

    def _write_split(self, split: str, token_bytes_digest: str) -> ShardIndex:
        spec, tokenizer = self.spec, self.tokenizer
        dtype = stored_dtype(tokenizer.vocab_size)
        line = Line(join_parts(self.parts, self.work, split), dtype, spec.seq_len, split, spec.seed)
        if line.num_rows < 1:
            raise DataError(
                f"prepare.source: {spec.source} gives no row of {spec.seq_len} tokens to the {split} split; "
                f"each split needs one; add documents (a file is one), lower seq_len or change heldout_percent (0: no valid split)"
            )
        row_bytes = (spec.seq_len + 1) * np.dtype(dtype).itemsize
        rows_per_block = max(1, (spec.block_kib << 10) // row_bytes)
        blocks_per_shard = max(1, (spec.shard_mib << 20) // (rows_per_block * row_bytes))
        shards, num_bytes = pack(
            line,
            str(spec.output),
            rows_per_block,
            blocks_per_shard,
            tokenizer.token_bytes,
            self.workers,
            done=lambda count, total: self.report(f"write {split}", count, total),
        )
        return ShardIndex(
            dtype=dtype,
            seq_len=spec.seq_len,
            vocab_size=tokenizer.vocab_size,
            bos_id=tokenizer.bos_id,
            eos_id=tokenizer.eos_id,
            num_rows=line.num_rows,
            num_tokens=line.num_rows * spec.seq_len,
            num_bytes=num_bytes,
            rows_per_block=rows_per_block,
            blocks_per_shard=blocks_per_shard,
            fingerprint=self.fingerprint,
            token_bytes_digest=token_bytes_digest,
            shards=shards,
        )

    def _summary(self, train: ShardIndex, valid: ShardIndex | None) -> PreparedSummary:
        return PreparedSummary(
            url=self.store.url,
            fingerprint=self.fingerprint,
            num_documents=sum(part.num_documents for part in self.parts),
            train_rows=train.num_rows,
            valid_rows=valid.num_rows if valid else 0,
            train_tokens=train.num_tokens,
            valid_tokens=valid.num_tokens if valid else 0,
            bytes_per_token=round(train.num_bytes / train.num_tokens, 4),
        )


def _as_json(value: dict) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
