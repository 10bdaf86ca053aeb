"""Turn a wait without end into an error that says who waits, where, and in which collective.

gloo raises in the collective that times out. NCCL returns at once and kills the process from a thread of its own: there
a second thread speaks before it does.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType

from moe_zoo.comm.agree import lost_peer
from moe_zoo.parallel.position import Position

SPEAK_AT = 0.9  # of the collectives' timeout, before NCCL ends the process


def waits_for_a_peer(error: RuntimeError, rank: int, where: str) -> str | None:
    """The line to end with when a collective failed for want of another rank; None if the error is of another kind."""
    if (what := lost_peer(error)) is None:
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return (
        f"train: rank {rank} waits in {where}, {collective(frames)}, for another rank, which {what}; "
        f"its own message, or the log of what killed it, says why; the same command goes on from the last checkpoint"
    )


def collective(frames: list[FrameType]) -> str:
    """The collective among these frames, outermost first: torch's own name of it, or else who waits for one."""
    names = [frame.f_code.co_name for frame in frames if frame.f_code.co_filename.endswith("distributed_c10d.py")]
    return next((name for name in names if name != "wrapper"), frames[-1].f_code.co_name)


class StallWatch:
    """A thread that speaks once when a rank has not moved for most of the collectives' timeout."""

    def __init__(self, position: Position, timeout_s: float, tell: Callable[[str], None]):
        self.position, self.patience_s, self.tell = position, SPEAK_AT * timeout_s, tell
        self.ended, self.watched = threading.Event(), threading.get_ident()
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self.ended.set()

    def _watch(self) -> None:
        told_of = None
        while not self.ended.wait(self.patience_s / 20):
            moved_at = self.position.moved_at
            if time.monotonic() - moved_at > self.patience_s and told_of != moved_at:
                told_of = moved_at
                self.tell(f"has not moved for {self.patience_s:.0f} s in {self.position.place}, {self._collective()}")

    def _collective(self) -> str:
        frame = sys._current_frames().get(self.watched)
        return collective([f for f, _ in traceback.walk_stack(frame)][::-1])
