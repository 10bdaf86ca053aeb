"""Tokenized parts: a corpus cut in runs of about 1 MiB of text, each tokenized once and kept until all are done."""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_128

from data_pipelines.corpus import Document, is_heldout
from data_pipelines.files import disk_full_is_clear, write_atomically
from data_pipelines.jobs import Workers
from data_pipelines.tokenizer import Tokenizer, load_tokenizer

PART_BYTES = 1 << 20
SPLITS = ("train", "valid")


class Part(NamedTuple):
    """Which documents stand together; the cut depends on the corpus alone."""

    split: str
    number: int  # in its split
    num_documents: int
    digest: str  # of names and texts

    @property
    def file_name(self) -> str:
        return f"{self.split}-{self.number:06d}-{self.digest[:16]}.ids"


def cut_parts(corpus: Iterable[Document], heldout_percent: int) -> Iterator[tuple[Part, list[str]]]:
    """Each part with its texts, in an order that follows from the corpus."""
    held: dict[str, list[Document]] = {split: [] for split in SPLITS}
    sizes, numbers = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)

    def close(split: str) -> tuple[Part, list[str]]:
        taken, held[split], sizes[split] = held[split], [], 0
        numbers[split] += 1
        return Part(split, numbers[split] - 1, len(taken), _digest(taken)), [d.text for d in taken]

    for document in corpus:
        split = SPLITS[is_heldout(document.name, heldout_percent)]
        held[split].append(document)
        sizes[split] += len(document.text)
        if sizes[split] >= PART_BYTES:
            yield close(split)
    yield from (close(split) for split in SPLITS if held[split])


def _digest(taken: list[Document]) -> str:
    hasher = xxh3_128()
    for name, text in taken:
        hasher.update(f"{len(name)} {len(text)} {name}".encode())
        hasher.update(text.encode())
    return hasher.hexdigest()


def tokenize_parts(
    parts: Iterable[tuple[Part, list[str]]], tokenizer: Tokenizer, folder: Path, workers: Workers, done: Callable
) -> None:
    """Write the file of every part that has none yet; ``done()`` after each part, new or old."""

    def jobs() -> Iterator[tuple]:
        for part, texts in parts:
            if (folder / part.file_name).is_file():
                done()
            else:
                yield str(tokenizer.folder), texts, folder / part.file_name

    for _ in workers.map(_tokenize, jobs()):
        done()


def _tokenize(tokenizer_folder: str, texts: list[str], path: Path) -> None:
    tokenizer = _open(tokenizer_folder)
    ids: list[int] = []
    for text in texts:
        ids += [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
    write_atomically(path, np.array(ids, dtype=stored_dtype(tokenizer.vocab_size)).data)


@lru_cache(maxsize=1)
def _open(folder: str) -> Tokenizer:
    return load_tokenizer(folder)


def stored_dtype(vocab_size: int) -> str:
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def join_parts(parts: list[Part], folder: Path, split: str) -> Path:
    """One file with all ids of a split, in the order of its documents."""
    path = folder / f"{split}.ids"
    with disk_full_is_clear(path), path.open("wb") as joined:
        for part in parts:
            if part.split == split:
                joined.write((folder / part.file_name).read_bytes())
    return path
