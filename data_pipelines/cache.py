"""A bounded block cache on a node's disk, shared by its ranks: files named by the hash of what they hold."""

import logging
import os
from pathlib import Path

from data_pipelines.errors import DataError
from data_pipelines.files import write_atomically
from data_pipelines.store import Block, Store, mismatch

log = logging.getLogger(__name__)


class CachedStore:
    """A remote store whose blocks are kept on disk. Any number of processes may share the folder without locks:

    files appear by rename and are never changed, a block that vanished or went bad is fetched again, and the least
    recently used ones go first.
    """

    is_remote = True

    def __init__(self, remote: Store, folder: Path, max_bytes: int):
        if max_bytes < 1 << 20:
            raise DataError(f"cache_bytes: {max_bytes}; a cache holds at least one block of 1 MiB; raise it")
        self.url, self._remote, self._folder, self._max_bytes = remote.url, remote, folder, max_bytes
        self._added = max_bytes  # bytes since the last sweep: the first write sweeps

    def read(self, name: str) -> bytes | None:
        return self._remote.read(name)

    def write(self, name: str, data: bytes | memoryview) -> None:
        self._remote.write(name, data)

    def read_block(self, block: Block) -> memoryview:
        path = self._folder / f"{block.digest}.block"
        try:
            data = memoryview(path.read_bytes())
            os.utime(path)  # the time of last use
        except OSError:
            data = memoryview(b"")  # not there, or not for us: the remote store has it
        if mismatch(block, data):
            data = self._remote.read_block(block)
            try:
                self._keep(path, data)
            except (DataError, OSError) as error:  # a full disk must not stop training
                log.warning("block not cached: %s", error)
        return data

    def _keep(self, path: Path, data: memoryview) -> None:
        """Sweep before writing. Sweeps are rare and leave an eighth free, enough for 8 ranks between their sweeps."""
        allowed = self._max_bytes * 7 // 8 - len(data)
        self._added += len(data)
        if self._added > self._max_bytes // 64:
            self._sweep(allowed)
            self._added = 0
        if allowed >= 0:
            write_atomically(path, data, survives_power_loss=False)  # a torn block is noticed and fetched again

    def _sweep(self, allowed: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        files = []
        for entry in os.scandir(self._folder):
            try:
                files.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
            except FileNotFoundError:
                continue  # another rank swept it
        for _, size, path in sorted(files, reverse=True):
            allowed -= size
            if allowed < 0:
                Path(path).unlink(missing_ok=True)
