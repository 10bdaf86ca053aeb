"""Real ranks of the real command line, forked from a process that has imported everything: no seconds per start.

The launcher is this file: it sets the environment of torchrun, passes signals on, and after the first failure gives
the other ranks ``PEERS_REPORT_S`` before it stops them, as ``moe-zoo train --processes`` does.
"""

import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from moe_zoo.comm.processes import PEERS_REPORT_S

TIMEOUT_S = 120
HEAVY = ["tests.warm_ranks", "moe_zoo.train.trainer", "moe_zoo.engines.fsdp", "moe_zoo.engines.deepspeed", "wandb"]


class Ended(NamedTuple):
    """How a command ended: the first failure's code, or 0."""

    code: int
    stdout: str
    stderr: str


class Launch:
    """``moe_zoo <words>`` on ``processes`` ranks. ``max_file_bytes`` is where the kernel refuses to write on."""

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        processes: int,
        *,
        max_file_bytes: int = 0,
        without: tuple[str, ...] = (),
    ):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(HEAVY)
        self.out, self.err = folder / "stdout.txt", folder / "stderr.txt"
        for file in (self.out, self.err):
            file.write_text("")
        port = _free_port()
        self.ranks = []
        for rank in range(processes):
            described = (rank, rank, processes, processes, "127.0.0.1", port)
            names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
            variables = {name: str(value) for name, value in zip(names, described, strict=True)}
            settings = (list(words), variables, str(self.out), str(self.err), max_file_bytes, without)
            process = context.Process(target=_rank, args=settings, daemon=True)
            process.start()
            self.ranks.append(process)

    def when_told(self, text: str, number: int, ranks: slice = slice(None)) -> "Launch":
        """Send a signal to every rank, or to some, once ``text`` stands on stdout."""
        _until(lambda: text in self.out.read_text() or not all(rank.is_alive() for rank in self.ranks))
        for rank in self.ranks[ranks]:
            os.kill(rank.pid, number)
        return self

    def end(self) -> Ended:
        """Wait for every rank."""
        _until(lambda: any(rank.exitcode for rank in self.ranks) or all(rank.exitcode == 0 for rank in self.ranks))
        failed = [rank.exitcode for rank in self.ranks if rank.exitcode]
        if failed:
            time.sleep(PEERS_REPORT_S)
        for rank in self.ranks:
            if rank.is_alive():
                rank.terminate()
            rank.join()
        return Ended(failed[0] if failed else 0, self.out.read_text(), self.err.read_text())


def _rank(words, variables, out: str, err: str, max_file_bytes: int, without: tuple[str, ...]) -> None:
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)
    os.environ.update(variables)
    for module in without:
        sys.modules[module] = None  # as if it were not installed
    if max_file_bytes:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    import torch

    from moe_zoo import cli

    torch.set_num_threads(1)
    cli.main(words)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
