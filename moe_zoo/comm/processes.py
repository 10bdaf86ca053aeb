"""This machine's processes: start the ranks of one node, pass signals on, die with the launcher, tune malloc."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from moe_zoo.comm.launch import LAUNCHED_BY_US, STORE_FD

PR_SET_PDEATHSIG = 1  # linux/prctl.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc malloc.h
POLL_S = 0.05
PEERS_REPORT_S = 0.5  # what the other ranks get to tell their own error after the first has failed


def start_processes(processes: int, argv: Sequence[str], grace_s: float = 30.0) -> int:
    """Run ``python argv`` as ``processes`` ranks of one world on this machine; the exit code is the first failure's.

    SIGINT and SIGTERM go to every rank, once, so that they can save. After a failure the others are told to stop,
    and killed ``grace_s`` later.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=processes) as listener:
        listener.set_inheritable(True)
        ranks = [_start(rank, processes, argv, listener) for rank in range(processes)]
    handlers = {number: signal.signal(number, _forwarder(ranks)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _wait(ranks)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _stop(ranks, grace_s)


def die_with_launcher() -> None:
    """Ask Linux for SIGTERM when the process that started this one ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def tune_allocator() -> bool:
    """Let glibc keep freed memory instead of returning it to the kernel: page faults dominate a step on CPU.

    Large blocks otherwise come from mmap and are zeroed anew each time. Returns whether glibc took the settings.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    return all([libc.mallopt(M_MMAP_THRESHOLD, 1 << 30), libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)])


def _start(rank: int, world: int, argv: Sequence[str], listener: socket.socket) -> "subprocess.Popen[bytes]":
    address, port = listener.getsockname()
    variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world,
                 "MASTER_ADDR": address, "MASTER_PORT": port, LAUNCHED_BY_US: 1}  # fmt: skip
    if rank == 0:
        variables[STORE_FD] = listener.fileno()
    return subprocess.Popen(
        [sys.executable, *argv],
        env=os.environ | {name: str(value) for name, value in variables.items()},
        pass_fds=(listener.fileno(),) if rank == 0 else (),
        start_new_session=True,  # a terminal's ctrl-C reaches the ranks through us alone
    )


def _forwarder(ranks: "Sequence[subprocess.Popen[bytes]]") -> Callable[[int, object], None]:
    def forward(number: int, frame: object) -> None:
        for rank in ranks:
            rank.send_signal(number)

    return forward


def _wait(ranks: "Sequence[subprocess.Popen[bytes]]") -> int:
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [code for code in codes if code]
        if failed:
            time.sleep(PEERS_REPORT_S)
            return _exit_code([rank.poll() or 0 for rank in ranks], failed[0])
        if None not in codes:
            return 0
        time.sleep(POLL_S)


def _exit_code(codes: Sequence[int], first: int) -> int:
    """A user's error (2) explains the others; a signal becomes what a shell would call it."""
    code = 2 if 2 in codes else first
    return 128 - code if code < 0 else code


def _stop(ranks: "Sequence[subprocess.Popen[bytes]]", grace_s: float) -> None:
    running = [rank for rank in ranks if rank.poll() is None]
    for rank in running:
        rank.terminate()
    deadline = time.monotonic() + grace_s
    for rank in running:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
