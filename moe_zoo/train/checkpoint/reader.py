"""Read a checkpoint in any layout. Nothing is believed before its hash was seen."""

import bisect
import json
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import xxhash
from torch import Tensor

from moe_zoo.parallel.placement import Cut, Placement
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.errors import CheckpointError, RecipeError
from moe_zoo.spec.recipe import Recipe
from moe_zoo.train.checkpoint.format import FORMAT, ITEM_BYTES, MANIFEST, Chunk, digest, step_of

BLOCK = 1 << 20  # elements looked up at once; each costs some dozens of bytes


class Checkpoint:
    """One complete checkpoint. Raises ``CheckpointError`` if it is torn, altered or of another format."""

    def __init__(self, folder: Path):
        self.folder = folder
        manifest = self._read_manifest()
        self.step: int = manifest["step"]
        self.stream: dict[str, Any] | None = manifest.get("stream")  # where the data stood
        try:
            self.recipe = Recipe.from_dict(manifest["recipe"])
        except RecipeError as error:
            raise CheckpointError(
                f"checkpoint {folder}: its recipe is of another version of moe-zoo ({error}); use that version to resume "
                f"or export it"
            ) from None
        self.newest: tuple[Chunk, str, np.ndarray] | tuple[()] = ()  # read last, and verified
        self.chunks: dict[tuple[str, str], list[tuple[Chunk, str]]] = {}
        for table in manifest["tables"]:
            self._read_table(table)
        for runs in self.chunks.values():
            runs.sort(key=lambda run: run[0].start)

    @property
    def architecture(self) -> Architecture:
        """Of the model whose weights these are."""
        return self.recipe.model

    def names(self, key: str) -> list[str]:
        """Parameters that have ``key``: weight, exp_avg, exp_avg_sq or buffer."""
        return [name for name, k in self.chunks if k == key]

    def fetch_slice(self, placement: Placement, key: str, start: int, length: int) -> Tensor:
        """``length`` flat fp32 values of a slice from element ``start`` of it, whoever wrote them in whatever layout."""
        runs = self.chunks.get((placement.name, key), [])
        if placement.run is not None and all(chunk.slice is None for chunk, _ in runs):
            return self.fetch(placement.name, key, placement.run + start, length)
        out, is_found = np.empty(length, np.float32), np.zeros(length, bool)
        for chunk, file in runs:  # one after the other, so that each is read and hashed once
            self._fill(out, is_found, placement, start, chunk, file)
        if not is_found.all():
            missing = placement.whole_index(np.array([start + is_found.argmin()]))
            self._refuse_gap(placement.name, key, int(missing[0]))
        return torch.from_numpy(out)

    def _fill(
        self, out: np.ndarray, is_found: np.ndarray, placement: Placement, start: int, chunk: Chunk, file: str
    ) -> None:
        """Put into ``out``, elements of ``placement`` from ``start`` on, those that a chunk holds, and say which."""
        source = _source(chunk)
        ends = np.array([chunk.start, chunk.start + chunk.length - 1])
        low, high = source.whole_index(ends) if source else ends
        for first in range(0, len(out), BLOCK):
            block = slice(first, min(first + BLOCK, len(out)))
            begin, end = placement.whole_index(np.array([start + block.start, start + block.stop - 1]))
            if end < low or high < begin:
                continue
            wanted = placement.whole_index(np.arange(start + block.start, start + block.stop))
            local = (source.local_index(wanted) if source else wanted) - chunk.start
            is_here = (local >= 0) & (local < chunk.length)
            if is_here.any():
                out[block][is_here] = self._verified(chunk, file)[local[is_here]]
                is_found[block] |= is_here

    def _refuse_gap(self, name: str, key: str, element: int) -> NoReturn:
        raise CheckpointError(
            f"checkpoint {self.folder}: {key} of {name} has no element {element}; every element must be saved once; use "
            f"an earlier checkpoint"
        )

    def fetch(self, name: str, key: str, start: int, length: int) -> Tensor:
        """``length`` flat fp32 values of a whole parameter from element ``start``."""
        out = np.empty(length, np.float32)
        runs = self.chunks.get((name, key), [])
        if any(chunk.slice for chunk, _ in runs):
            shape = tuple(next(chunk.slice for chunk, _ in runs if chunk.slice)["shape"])
            return self.fetch_slice(Placement(name, shape, "whole"), key, start, length)
        first = max(0, bisect.bisect_right([chunk.start for chunk, _ in runs], start) - 1)
        covered = start
        for chunk, file in runs[first:]:
            if covered >= start + length:
                break
            begin, end = max(chunk.start, start), min(chunk.start + chunk.length, start + length)
            if begin != covered:
                break
            out[begin - start : end - start] = self._verified(chunk, file)[begin - chunk.start : end - chunk.start]
            covered = end
        if covered != start + length:
            self._refuse_gap(name, key, covered)
        return torch.from_numpy(out)

    def verify(self) -> None:
        """Read everything once. Raises ``CheckpointError`` for the first chunk that is not what was written."""
        for runs in self.chunks.values():
            for chunk, file in runs:
                self._verified(chunk, file)

    def check_model(self, architecture: Architecture) -> None:
        """Refuse to put these weights into another model."""
        ours, theirs = (_flat(a.to_dict()) for a in (architecture, self.architecture))
        for key in sorted(ours.keys() | theirs.keys()):  # every rank names the same one
            if ours.get(key) != theirs.get(key):
                raise CheckpointError(
                    f"checkpoint {self.folder}: holds another model, {key} is {theirs.get(key)} there and "
                    f"{ours.get(key)} in the recipe; give the run another name, or set checkpoint.resume=false"
                )

    def check_stream(self, path: str, fingerprint: str) -> None:
        """Refuse to go on in data that was prepared anew in the same place. Another path is a choice, and allowed."""
        if self.stream and self.stream["path"] == path and self.stream["fingerprint"] != fingerprint:
            raise CheckpointError(
                f"checkpoint {self.folder}: {path} holds other data than when it was saved; the resumed run would not "
                f"be the same run; restore the data, or give the run another name"
            )

    def _verified(self, chunk: Chunk, file: str) -> np.ndarray:
        if self.newest[:2] == (chunk, file):
            return self.newest[2]
        raw = self._bytes(chunk, file)
        if len(raw) != chunk.length * ITEM_BYTES or xxhash.xxh3_128_hexdigest(raw) != chunk.xxh3:
            raise CheckpointError(
                f"checkpoint {self.folder}: {file} is damaged at byte {chunk.offset} ({chunk.key} of {chunk.name}); "
                f"its hash is not the one written; delete that folder to resume from the one before"
            )
        self.newest = (chunk, file, np.frombuffer(raw, np.float32))
        return self.newest[2]

    def _bytes(self, chunk: Chunk, file: str) -> bytes:
        try:
            with open(self.folder / file, "rb") as stream:
                stream.seek(chunk.offset)
                return stream.read(chunk.length * ITEM_BYTES)
        except OSError:  # gone or unreadable: less than was written
            return b""

    def _read_manifest(self) -> dict[str, Any]:
        path = self.folder / MANIFEST
        if not path.exists():
            raise CheckpointError(f"checkpoint {self.folder}: no {MANIFEST}; it was never finished; delete the folder")
        manifest = self._json(path)
        stated = manifest.pop("sha256", None)
        if manifest.get("format") != FORMAT or stated != digest(manifest):
            raise CheckpointError(
                f"checkpoint {self.folder}: {MANIFEST} is damaged or of another format; delete the folder to resume "
                f"from the one before"
            )
        return manifest

    def _read_table(self, table: dict[str, str]) -> None:
        rows = self._json((self.folder / table["file"]).with_suffix(".json"))
        if digest(rows) != table["sha256"]:
            raise CheckpointError(
                f"checkpoint {self.folder}: the table of {table['file']} is damaged; delete the folder"
            )
        for row in rows:
            chunk = Chunk(**row)
            if not chunk.length:  # a rank that answers for no element, where there are more ranks than rows
                continue
            self.chunks.setdefault((chunk.name, chunk.key), []).append((chunk, table["file"]))

    def _json(self, path: Path) -> Any:
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"checkpoint {self.folder}: {path.name}: {error}; delete the folder") from None


def latest_checkpoint(root: Path, warn=lambda text: None) -> Checkpoint | None:
    """The newest checkpoint below ``root`` that verifies; damaged ones are named to ``warn`` and skipped.

    Raises ``CheckpointError`` if there are checkpoints and none is whole: a run never starts anew in silence.
    """
    found = root.iterdir() if root.is_dir() else []
    folders = sorted((folder for folder in found if step_of(folder) is not None), key=step_of, reverse=True)
    for folder in folders:
        try:
            checkpoint = Checkpoint(folder)
            checkpoint.verify()
            return checkpoint
        except CheckpointError as error:
            warn(str(error))
    if any((folder / MANIFEST).exists() for folder in folders):
        raise CheckpointError(
            f"checkpoint {root}: none of {len(folders)} checkpoints is whole; training does not start anew over "
            f"them; move the folder away, or set checkpoint.resume=false"
        )
    return None


def _source(chunk: Chunk) -> Placement | None:
    """The slice in which the chunk's elements are counted; None: the whole parameter."""
    if chunk.slice is None:
        return None
    return Placement(chunk.name, tuple(chunk.slice["shape"]), "", tuple(Cut(*cut) for cut in chunk.slice["cuts"]))


def _flat(values: Any, path: str = "model") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {path: values}
    return {key: leaf for name, value in values.items() for key, leaf in _flat(value, f"{path}.{name}").items()}
