"""Local files: a write is whole or it did not happen, and a full disk is one clear line."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_pipelines.errors import DataError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_atomically(path: Path, data: bytes | memoryview, survives_power_loss: bool = True) -> None:
    """Write beside ``path``, fsync, rename: readers see the old file or the new one, never a part."""
    with disk_full_is_clear(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(file.fileno(), 0o644)
                if survives_power_loss:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        if survives_power_loss:
            _sync_folder(path.parent)


@contextmanager
def disk_full_is_clear(path: Path) -> Iterator[None]:
    """Turn "no space", "over quota" and "file too large" into one line that names the folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DataError(
            f"{path}: {os.strerror(error.errno or 0)}; what was finished is kept; free space there and run again"
        ) from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
