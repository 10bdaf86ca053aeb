"""Ctrl-C and SIGTERM end a run at the next step boundary, on all ranks at the same step."""

import enum
import signal
from types import FrameType

import torch
import torch.distributed as dist

from moe_zoo.comm.mesh import Mesh


class Verdict(enum.Enum):
    """What the ranks do next."""

    GO = 0
    STOP = 1
    FAIL = 2  # some rank could not read its data


class StopRequest:
    """Remembers the first signal; a second one does what it always did."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.previous = {number: signal.signal(number, self._remember) for number in (signal.SIGINT, signal.SIGTERM)}

    def agreed(self, mesh: Mesh, has_failed: bool) -> "Verdict":
        """The gravest verdict of any rank. Every rank calls it once per step."""
        own = Verdict.FAIL if has_failed else Verdict.STOP if self.signal is not None else Verdict.GO
        verdict = torch.tensor(own.value, device=mesh.device)
        dist.all_reduce(verdict, op=dist.ReduceOp.MAX, group=mesh.stage_group)
        return Verdict(int(verdict))

    def restore(self) -> None:
        """Put the earlier handlers back."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, self.previous[number])
