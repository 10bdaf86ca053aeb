"""The ranks one machine starts for itself: how they end, and what the launcher makes of it."""

import ctypes
import subprocess
import sys
import time

import pytest

from moe_zoo.comm.processes import start_processes, tune_allocator

RANK = "import os, signal, sys, time; rank = int(os.environ['RANK']); "


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("sys.exit(2 if rank else 0)", 2),
        ("sys.exit(7 if rank else 0)", 7),
        ("sys.exit(2 if rank else 1)", 2),
        ("rank and os.kill(os.getpid(), signal.SIGKILL)", 137),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(code, status):
    assert start_processes(2, ["-c", RANK + code]) == status


def test_ranks_left_behind_are_stopped_and_then_killed():
    stubborn = "rank or (signal.signal(signal.SIGTERM, signal.SIG_IGN), time.sleep(60)); time.sleep(0.3); sys.exit(3)"
    start = time.monotonic()
    assert start_processes(2, ["-c", RANK + stubborn], grace_s=0.5) == 3
    assert time.monotonic() - start < 20


def test_each_rank_is_told_who_it_is(tmp_path):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MOE_ZOO_LAUNCHED")
    code = f"open(rf'{tmp_path}/{{rank}}', 'w').write(' '.join(os.environ[n] for n in {names}))"
    assert start_processes(3, ["-c", RANK + code]) == 0
    told = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert told == [f"{rank} 3 {rank} 3 127.0.0.1 1" for rank in range(3)]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc alone")
def test_a_tuned_allocator_keeps_large_blocks():
    """Fresh in a process of its own: 64 MiB used and freed ten times faults its 16,384 pages once, not ten times."""
    code = (
        "import sys, resource\nfrom moe_zoo.comm.processes import tune_allocator\n"
        "if sys.argv[1] == 'tuned': assert tune_allocator()\n"
        "for _ in range(10): bytearray(64 << 20)[:: 4096]\n"
        "import ctypes; libc = ctypes.CDLL(None); libc.malloc.restype = ctypes.c_void_p\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(10):\n"
        "    block = ctypes.c_void_p(libc.malloc(64 << 20)); ctypes.memset(block, 1, 64 << 20); libc.free(block)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"
    )

    def faults(how: str) -> int:
        return int(subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True).stdout)

    assert faults("tuned") < faults("plain") / 3


def test_tuning_twice_is_harmless():
    assert tune_allocator() == tune_allocator()
