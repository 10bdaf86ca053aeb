"""Run pure jobs over spawned processes, results in the order of the jobs: the answer never depends on how many."""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any, Self

from data_pipelines.errors import DataError


class Workers:
    """A pool that starts with its first job; one worker means this process, and nothing is started."""

    def __init__(self, count: int):
        self.count = count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def map(self, function: Callable, jobs: Iterable[tuple]) -> Iterator[Any]:
        """``function(*job)`` of each job; jobs are made as they are needed, so they may be large."""
        if self.count == 1:
            yield from (function(*job) for job in jobs)
            return
        try:
            yield from self._spread(function, jobs)
        except BrokenProcessPool as error:
            raise DataError(
                f"workers: {self.count}; one ended early, for want of memory or because your script does not guard its "
                f'work with if __name__ == "__main__"; what was finished is kept; guard it, or set workers to 1'
            ) from error

    def _spread(self, function: Callable, jobs: Iterable[tuple]) -> Iterator[Any]:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self.count, mp_context=multiprocessing.get_context("spawn"))
        waiting: deque[Future] = deque()
        for job in jobs:
            waiting.append(self._pool.submit(function, *job))
            if len(waiting) > 2 * self.count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def worker_count(asked: int, num_jobs: int) -> int:
    """``asked``, or for 0 the cores of this process, fewer when jobs are too few to pay for a start."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS
    return asked or max(1, min(cores, num_jobs // 4))
