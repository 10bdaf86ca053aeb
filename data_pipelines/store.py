"""Where prepared data lies: a local folder or an S3-compatible bucket, behind five methods.

Remote reads go through obstore, in threads of this process, never after a fork: its runtime lives once per process
and a forked child that uses it waits for ever, so a child is refused instead.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from xxhash import xxh3_128_hexdigest

from data_pipelines.errors import DataError, StreamError
from data_pipelines.files import write_atomically
from data_pipelines.retry import Retry, Transient, run

CACHE_BYTES = 16 << 30


class Block(NamedTuple):
    """A run of bytes in an object, and the hash they must have."""

    name: str
    number: int
    offset: int
    size: int
    digest: str  # xxh3_128, hex


class Store(Protocol):
    url: str
    is_remote: bool

    def read(self, name: str) -> bytes | None:
        """The whole object, or None when there is none."""
        ...

    def read_block(self, block: Block) -> memoryview:
        """Verified bytes, or StreamError."""
        ...

    def write(self, name: str, data: bytes | memoryview) -> None: ...


def open_store(
    url: str | Path, cache_dir: str | Path | None = None, cache_bytes: int = CACHE_BYTES, retry: Retry | None = None
) -> Store:
    """A folder, ``file://`` or ``s3://bucket/prefix``; ``cache_dir`` keeps remote blocks on this node's disk."""
    scheme, _, rest = str(url).partition("://")
    if not rest:
        return LocalStore(Path(url))
    if scheme == "file":
        return LocalStore(Path(urlsplit(str(url)).path))
    if scheme != "s3":
        raise DataError(f"{url}: scheme {scheme!r}; data lies in a local folder or under s3://bucket/prefix; change it")
    remote = S3Store(str(url), retry or Retry())
    if cache_dir is None:
        return remote
    from data_pipelines.cache import CachedStore

    return CachedStore(remote, Path(cache_dir), cache_bytes)


def mismatch(block: Block, data: memoryview) -> str | None:
    """What is wrong with the bytes that came for ``block``."""
    if len(data) != block.size:
        return f"{len(data)} of {block.size} bytes"
    actual = xxh3_128_hexdigest(data)
    return None if actual == block.digest else f"xxh3_128 {actual}, the index says {block.digest}"


def corrupt(url: str, block: Block, problem: str) -> StreamError:
    return StreamError(
        f"{url}/{block.name}: block {block.number} has {problem}; a block must match the hash in its index; "
        f"restore this shard from a good copy, or delete the folder and prepare again"
    )


class LocalStore:
    is_remote = False

    def __init__(self, root: Path):
        self.root, self.url = root, str(root)

    def read(self, name: str) -> bytes | None:
        path = self.root / name
        return path.read_bytes() if path.is_file() else None

    def read_block(self, block: Block) -> memoryview:
        try:
            with open(self.root / block.name, "rb", buffering=0) as file:
                data = memoryview(os.pread(file.fileno(), block.size, block.offset))
        except OSError as error:
            raise corrupt(self.url, block, f"no bytes to read ({error.strerror})") from error
        if problem := mismatch(block, data):
            raise corrupt(self.url, block, problem)
        return data

    def write(self, name: str, data: bytes | memoryview) -> None:
        write_atomically(self.root / name, data)


class _Runtime:
    """What the fork guard knows about obstore's runtime, which exists once per process."""

    used = False
    forked = False

    @classmethod
    def enter(cls, url: str) -> None:
        if cls.forked:
            raise StreamError(
                f"{url}: read in a forked child; the object store's runtime does not survive fork; "
                f'start workers with "spawn" or "forkserver", or open the stream in the parent only'
            )
        if not cls.used:
            cls.used = True
            os.register_at_fork(after_in_child=cls._mark)

    @classmethod
    def _mark(cls) -> None:
        cls.forked = True


class S3Store:
    """``s3://bucket/prefix`` with the standard AWS_* environment: keys, region, AWS_ENDPOINT_URL."""

    is_remote = True

    def __init__(self, url: str, retry: Retry):
        parts = urlsplit(url)
        if not parts.netloc:
            raise DataError(f"{url}: no bucket; a remote folder is s3://bucket/prefix; add the bucket")
        self.url, self.retry = url.rstrip("/"), retry
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        self._client: Any = None

    def read(self, name: str) -> bytes | None:
        import obstore

        try:
            return self._run(name, lambda client, key: bytes(obstore.get(client, key).bytes()))
        except FileNotFoundError:
            return None

    def read_block(self, block: Block) -> memoryview:
        import obstore

        def request(client: Any, key: str) -> memoryview:
            data = memoryview(obstore.get_range(client, key, start=block.offset, length=block.size))
            if problem := mismatch(block, data):
                raise Transient(problem)  # damage on the way heals; damage in the bucket does not
            return data

        try:
            return self._run(block.name, request)
        except FileNotFoundError as error:
            raise corrupt(self.url, block, "no object to read") from error
        except StreamError as error:
            if isinstance(error.__cause__, Transient):
                raise corrupt(self.url, block, str(error.__cause__)) from error
            raise

    def write(self, name: str, data: bytes | memoryview) -> None:
        import obstore

        try:
            self._run(name, lambda client, key: obstore.put(client, key, bytes(data)))
        except FileNotFoundError as error:
            raise DataError(
                f"{self.url}: no such bucket; nothing is created for you; create it, or fix its name"
            ) from error

    def _run(self, name: str, request: Any) -> Any:
        from obstore.exceptions import GenericError, PermissionDeniedError, UnauthenticatedError

        _Runtime.enter(self.url)
        client, key = self._open(), f"{self._prefix}/{name}" if self._prefix else name
        where = f"{self.url}/{name}"
        try:
            return run(lambda: request(client, key), self.retry, where, GenericError)
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise StreamError(
                f"{where}: the store refused access; keys come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; "
                f"check them and the bucket's policy"
            ) from error

    def _open(self) -> Any:
        if self._client is None:
            from obstore.store import S3Store as Client

            self._client = Client(
                self._bucket,
                client_options={
                    "allow_http": _allows_http(self.url),
                    "timeout": f"{self.retry.request_s} s",
                    "connect_timeout": f"{self.retry.connect_s} s",
                },
                retry_config={"max_retries": 0},  # ours is the only retry: its total time is bounded
            )
        return self._client


def _allows_http(url: str) -> bool:
    """Plain HTTP is for this machine's own servers, or where AWS_ALLOW_HTTP asks for it."""
    endpoint = urlsplit(os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "")
    if endpoint.scheme != "http":
        return False
    host = endpoint.hostname or ""
    if host == "localhost" or host == "::1" or host.startswith("127."):
        return True
    if os.environ.get("AWS_ALLOW_HTTP", "").lower() != "true":
        raise DataError(
            f"{url}: endpoint {endpoint.geturl()} is plain HTTP; only loopback may be; use https, or set AWS_ALLOW_HTTP=true"
        )
    return True
