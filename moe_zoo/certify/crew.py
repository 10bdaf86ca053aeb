"""The ranks that work on a certificate: started once, silent, and allowed to fail."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from moe_zoo.certify.measure import Deviation
from moe_zoo.comm.rank_pool import RankError, run_distributed

Measurement = Callable[..., list[Deviation]]
Around = Callable[[], AbstractContextManager]


class CrewError(Exception):
    """A rank crashed or hung; one line."""


class Crew(NamedTuple):
    """``ranks`` processes, what they do their work in, and where their words go."""

    ranks: int
    log: Path = Path(os.devnull)
    around: Around = nullcontext
    timeout_s: float = 120.0  # of one measurement

    def measure(self, body: Measurement, *args: Any) -> list[Deviation]:
        """What ``body(*args)`` found on any rank. Raises ``CrewError``; the traceback is in the log."""
        work = (self.log, self.around, body, args)
        try:
            by_rank = run_distributed(_on_rank, *work, world_size=self.ranks, timeout_s=self.timeout_s)
        except RankError as error:
            with open(self.log, "a") as log:
                log.write(f"{error}\n")
            raise CrewError(f"rank {error.rank}: {error.text.strip().splitlines()[-1]}") from None
        except TimeoutError as error:
            raise CrewError(str(error)) from None
        return list(chain.from_iterable(by_rank))


def _on_rank(log: Path, around: Around, body: Measurement, args: tuple) -> list[Deviation]:
    with _printing_to(log), around():
        return body(*args)


@contextmanager
def _printing_to(log: Path) -> Iterator[None]:
    """File descriptors 1 and 2 of this process, C libraries included."""
    kept, target = [os.dup(1), os.dup(2)], os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        for number in (1, 2):
            os.dup2(target, number)
        yield
    finally:
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(target)
