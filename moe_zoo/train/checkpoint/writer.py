"""Save what every rank answers for. A failure on one rank is everybody's, and leaves no checkpoint behind."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from moe_zoo.comm.agree import first_rank_decides
from moe_zoo.engines import Engine
from moe_zoo.spec.errors import CheckpointError
from moe_zoo.train.checkpoint.format import (
    FORMAT,
    ITEM_BYTES,
    MANIFEST,
    Chunk,
    data_file,
    digest,
    folder_name,
    step_of,
    sync_folder,
    write_durably,
)


def save_checkpoint(
    root: Path, engine: Engine, step: int, keep: int | None = None, stream: dict[str, Any] | None = None
) -> Path:
    """Write ``root/step-<step>`` from every rank and drop all but the newest ``keep``. Collective.

    ``stream`` says where the data stood: path, fingerprint and position. A folder of that step can only be one that was
    torn or found damaged, and is written anew.
    """
    folder, rank = root / folder_name(step), dist.get_rank()
    first_rank_decides(lambda: _remove(folder))
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, _attempt(folder, engine, rank))
    failure = next((error for error, _ in answers if error), None)

    def commit() -> None:
        manifest = {"format": FORMAT, "step": step, "stream": stream, "recipe": engine.recipe.to_dict()}
        manifest["tables"] = [table for _, table in answers]
        try:
            if failure:
                raise failure
            with _disk_trouble_told(folder):
                write_durably(folder / MANIFEST, json.dumps(manifest | {"sha256": digest(manifest)}, indent=1))
        except CheckpointError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        with _disk_trouble_told(folder):
            _drop_old(root, keep, step)

    first_rank_decides(commit)
    return folder


def _remove(folder: Path) -> None:
    if folder.exists():
        with _disk_trouble_told(folder):
            (folder / MANIFEST).unlink(missing_ok=True)  # first: a crash half-way leaves no checkpoint, not a torn one
            shutil.rmtree(folder)


def _attempt(folder: Path, engine: Engine, rank: int) -> tuple[CheckpointError | None, dict[str, str] | None]:
    try:
        with _disk_trouble_told(folder):
            return None, _write_rank(folder, engine, rank)
    except CheckpointError as error:
        return error, None


@contextmanager
def _disk_trouble_told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(next(parent for parent in folder.parents if parent.exists())).free
        raise CheckpointError(
            f"checkpoint {folder}: {error.strerror or error}; {free >> 20} MiB are free; earlier checkpoints are "
            f"whole: free some space or lower checkpoint.keep, and start again to resume"
        ) from None


def _write_rank(folder: Path, engine: Engine, rank: int) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    chunks, offset = [], 0
    with open(folder / data_file(rank), "wb") as file:
        for name, key, start, values, cuts in _chunks(engine):
            raw = values.detach().to("cpu", torch.float32).contiguous().numpy()
            file.write(raw)
            chunks.append(Chunk(name, key, start, raw.size, offset, xxhash.xxh3_128_hexdigest(raw), cuts))
            offset += raw.size * ITEM_BYTES
        file.flush()
        os.fsync(file.fileno())
    table = [chunk._asdict() for chunk in chunks]
    write_durably((folder / data_file(rank)).with_suffix(".json"), json.dumps(table))
    sync_folder(folder)
    return {"file": data_file(rank), "sha256": digest(table)}


def _chunks(engine: Engine) -> Iterator[tuple[str, str, int, Tensor, dict[str, Any] | None]]:
    """(name, key, start, values, slice): starts count in the whole parameter wherever the slice is a run of it."""
    for shard in engine.shards():
        placement = engine.placements[shard.name]
        is_run = placement.run is not None
        cuts = None if is_run else {"shape": placement.shape, "cuts": placement.cuts}
        for key, values in shard.tensors.items():
            yield placement.name, key, shard.start + (placement.run or 0), values, cuts
    if engine.mesh.stage_rank == 0:  # the same on every rank of a stage
        for name, buffer in engine.buffers().items():
            yield name, "buffer", 0, buffer.view(-1), None


def _drop_old(root: Path, keep: int | None, step: int) -> None:
    """Of the checkpoints up to ``step``: a later one was found damaged, and must not crowd out a whole one."""
    if keep is None:
        return
    steps = {folder: step_of(folder) for folder in root.iterdir() if (folder / MANIFEST).exists()}
    for folder in sorted((f for f, s in steps.items() if s is not None and s <= step), key=steps.get)[:-keep]:
        _remove(folder)
