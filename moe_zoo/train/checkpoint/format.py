"""What a checkpoint folder holds.

    step-00000050/rank-00000.bin     raw little-endian fp32 values, chunk after chunk
    step-00000050/rank-00000.json    table of the chunks: parameter, key, run, offset, hash
    step-00000050/MANIFEST.json      written last: step, recipe, hash of every table; without it there is no checkpoint

A chunk is a run of a flattened parameter, or of a slice of it that is no run itself, whose cuts stand with it. Reading
in another layout is arithmetic on flat indices.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

MANIFEST = "MANIFEST.json"
FORMAT = 1
ITEM_BYTES = 4


class Chunk(NamedTuple):
    """``length`` values of ``key`` of parameter ``name`` from element ``start``, at ``offset`` bytes of a file.

    ``slice`` is ``{"shape": whole, "cuts": [...]}`` where ``start`` counts in a slice; see ``parallel.placement.Cut``.
    """

    name: str
    key: str
    start: int
    length: int
    offset: int
    xxh3: str
    slice: dict[str, Any] | None = None


def folder_name(step: int) -> str:
    """Folder of the checkpoint after ``step`` optimizer steps."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step of a checkpoint folder, None if it is not one."""
    match = re.fullmatch(r"step-(\d{8,})", folder.name)
    return int(match[1]) if match else None


def data_file(rank: int) -> str:
    """Data file of a rank; its table has the suffix ``.json``."""
    return f"rank-{rank:05d}.bin"


def digest(values: Any) -> str:
    """sha256 of plain values, independent of key order."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def write_durably(path: Path, text: str) -> None:
    """Write, fsync, rename, fsync the folder: after a crash the file is whole or absent."""
    partial = path.with_name(path.name + ".tmp")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and new files in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
