"""Corpora: a source -> its documents, in one order on every machine, without exact duplicates."""

import gzip
import json
import logging
import sysconfig
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from data_pipelines.errors import DataError

log = logging.getLogger(__name__)

STDLIB = "stdlib"
_SUFFIXES = (
    ".txt .text .md .rst .tex .html .xml .css .csv .py .pyi .ipynb .c .h .cc .cpp .hpp .cu .java .js .ts .go .rs "
    ".rb .php .sh .sql .r .jl .lua .scala .swift .kt .toml .yaml .yml .json"
)
TEXT_SUFFIXES = frozenset(_SUFFIXES.split())
MIN_STDLIB_CHARS = 64
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


class Document(NamedTuple):
    name: str  # the path inside the source; for a line of a .jsonl file, path:line
    text: str


def documents(source: str | Path) -> Iterator[Document]:
    """Every document of ``source`` once: "stdlib", a folder of text files, or a .jsonl(.gz) file with a "text" field.

    Sorted by file name; a text seen before is left out; files that are not UTF-8 are left out and logged.
    """
    seen: set[bytes] = set()
    for document in _all_documents(source):
        digest = blake2b(document.text.encode(), digest_size=16).digest()
        if digest not in seen and document.text.strip():
            seen.add(digest)
            yield document


def is_heldout(name: str, percent: int) -> bool:
    """Whether the document belongs to the valid split: ``percent`` of names, by hash (5: one residue of 20)."""
    residue = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") % 100
    return residue * percent % 100 < percent


def _all_documents(source: str | Path) -> Iterator[Document]:
    if str(source) == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        files = _files(root, frozenset({".py"}))
        yield from (d for d in _read_files(root, files) if len(d.text) >= MIN_STDLIB_CHARS)
        return
    path = Path(source)
    if path.is_dir():
        yield from _read_files(path, _files(path, TEXT_SUFFIXES))
    elif path.is_file() and (_is_jsonl(path) or path.suffix in TEXT_SUFFIXES):
        yield from _read_file(path, path.name)
    else:
        raise DataError(
            f'source: {str(source)!r}; a source is "{STDLIB}", a folder of text files, or a .jsonl or .jsonl.gz file; '
            f"check the path"
        )


def _files(root: Path, suffixes: frozenset[str]) -> list[Path]:
    """Files in the order of their path in the source, which does not depend on where the source lies."""
    found = [p for p in root.rglob("*") if (p.suffix in suffixes or _is_jsonl(p)) and p.is_file()]
    inside = [p for p in found if not _SKIPPED_FOLDERS.intersection(p.relative_to(root).parts)]
    if not inside:
        raise DataError(
            f"source: {str(root)!r}; holds no text file; known endings: {' '.join(sorted(suffixes))} .jsonl"
        )
    return sorted(inside, key=lambda p: p.relative_to(root).as_posix())


def _read_files(root: Path, files: list[Path]) -> Iterator[Document]:
    for path in files:
        yield from _read_file(path, path.relative_to(root).as_posix())


def _read_file(path: Path, name: str) -> Iterator[Document]:
    if _is_jsonl(path):
        yield from _read_jsonl(path, name)
        return
    try:
        yield Document(name, path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError:
        log.info("left out %s: not UTF-8", path)


def _is_jsonl(path: Path) -> bool:
    return path.name.endswith((".jsonl", ".jsonl.gz"))


def _read_jsonl(path: Path, name: str) -> Iterator[Document]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield Document(f"{name}:{number}", _text_of(line, f"{path}:{number}"))


def _text_of(line: bytes, where: str) -> str:
    rule = 'each line is a JSON object with a "text" string; fix or remove this line'
    try:
        text = json.loads(line)["text"]
        text.encode()  # a lone surrogate escape is valid JSON and no text
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{where}: {type(error).__name__} {str(error)[:80]!r}; {rule}") from error
    return text
