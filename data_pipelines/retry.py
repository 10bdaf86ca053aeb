"""Bounded retry of one request to an object store."""

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from data_pipelines.errors import StreamError

T = TypeVar("T")


class Retry(NamedTuple):
    """No try begins after ``total_s``, and one try lasts at most ``request_s``: the sum bounds every request."""

    attempts: int = 12
    total_s: float = 60.0
    first_delay_s: float = 0.1  # doubles up to 5 s
    request_s: float = 30.0  # covers the body: a block must arrive at block_bytes / request_s or faster
    connect_s: float = 5.0


class Transient(Exception):
    """Worth another try: the answer came, and is not what was asked for."""


def run(request: Callable[[], T], policy: Retry, where: str, transient: type[Exception]) -> T:
    """``request()``, again after each transient failure, until the policy is used up."""
    started, again = time.monotonic(), (Transient, transient)
    for attempt in range(1, policy.attempts + 1):
        try:
            return request()
        except Exception as error:
            if not isinstance(error, again):
                raise
            delay = min(policy.first_delay_s * 2 ** (attempt - 1), 5.0)
            elapsed = time.monotonic() - started
            if attempt == policy.attempts or elapsed + delay > policy.total_s:
                raise StreamError(
                    f"{where}: {_one_line(error)}; gave up after {attempt} tries in {elapsed:.0f} s; "
                    f"check the endpoint, the credentials and the network, and run again"
                ) from error
            time.sleep(delay)
    raise AssertionError("a retry policy has at least one attempt")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
