"""Run a function on several CPU ranks.

Importing torch and DeepSpeed costs seconds a process, a test of a law milliseconds: one pool of rank processes per
world size lives as long as the session. Process groups are made and destroyed around every call.
"""

import atexit
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

GRACE_S = 5.0  # a rank whose collective times out gets to say so itself
_pools: dict[int, "_Pool"] = {}


class RankError(AssertionError):
    """What a rank raised: ``text`` is its traceback."""

    def __init__(self, rank: int, world_size: int, text: str):
        super().__init__(f"rank {rank} of {world_size}:\n{text}")
        self.rank, self.text = rank, text


def run_distributed(body: Callable, *args: Any, world_size: int = 2, timeout_s: float = 120) -> list[Any]:
    """Run ``body(*args)`` on ``world_size`` CPU ranks and return what each returned.

    ``body`` is a module-level function. A rank's exception, with its traceback, becomes the caller's.
    """
    pool = _pools.get(world_size) or _pools.setdefault(world_size, _Pool(world_size))
    try:
        return pool.run(body, args, timeout_s)
    except BaseException:
        _pools.pop(world_size).close()  # the other ranks may hang in a collective: start afresh
        raise


class _Pool:
    """Rank processes that wait for work."""

    def __init__(self, world_size: int):
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(rank, world_size, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, body: Callable, args: tuple, timeout_s: float) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            for pipe in self.pipes:
                pipe.send((sys.path, f"{folder}/rendezvous", timeout_s))
                pipe.send((body, args))
            return self._collect(timeout_s)

    def _collect(self, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < len(self.pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in results}
            ready: list[Any] = wait(list(waiting), timeout=timeout_s + GRACE_S)
            if not ready:
                raise TimeoutError(f"ranks {list(waiting.values())} did not answer within {timeout_s} s")
            answers = {waiting[pipe]: _receive(pipe) for pipe in ready}
            failures = [(failed_at, rank, text) for rank, (failed_at, text) in answers.items() if failed_at]
            if failures:
                _, rank, text = min(failures)  # the first: what the others say follows from it
                raise RankError(rank, len(self.pipes), text)
            results |= {rank: value for rank, (_, value) in answers.items()}
        return [results[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _receive(pipe: Connection) -> tuple[float, Any]:
    """(when it failed or 0, result or traceback)."""
    try:
        return pipe.recv()
    except EOFError:
        return time.monotonic(), "its process ended without a word"


def _rank_main(rank: int, world_size: int, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the caller, who ends the ranks
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            path, rendezvous, timeout_s = pipe.recv()
        except EOFError:
            return
        sys.path[:] = path
        try:
            body, args = pipe.recv()
            pipe.send((0.0, _run_once(rank, world_size, rendezvous, timeout_s, body, args, pipe)))
        except BaseException:
            pipe.send((time.monotonic(), traceback.format_exc()))


def _run_once(
    rank: int, world_size: int, rendezvous: str, timeout_s: float, body: Callable, args: tuple, pipe: Connection
) -> Any:
    import torch.distributed as dist

    timeout, store = timedelta(seconds=timeout_s), dist.FileStore(rendezvous, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    store.set(f"joined{rank}", "")
    try:
        # A body that ends at once would otherwise leave while others still connect to this rank.
        store.wait([f"joined{peer}" for peer in range(world_size)], timeout)
        return body(*args)
    except BaseException:  # told before the group goes: then the others fail too
        pipe.send((time.monotonic(), traceback.format_exc()))
        raise
    finally:
        _forget_groups()
        dist.destroy_process_group()


def _forget_groups() -> None:
    """What libraries remember of process groups that go now. The next ones may bear the same names."""
    if deepspeed_comm := sys.modules.get("deepspeed.comm.comm"):
        vars(deepspeed_comm)["cdb"] = None
    if "torch.distributed.tensor" in sys.modules:  # to DTensors, meshes of the same ranks are equal
        from torch.distributed.tensor import _redistribute, debug

        debug._clear_sharding_prop_cache()
        _redistribute._gen_transform_infos.cache_clear()


@atexit.register
def _close_pools() -> None:
    for pool in _pools.values():
        pool.close()
