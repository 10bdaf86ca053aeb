"""One rank's error is everybody's: all ranks raise the same line instead of waiting for the one that left."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "timed out")


def first_rank_decides(task: Callable[[], T]) -> T:
    """Run ``task`` on rank 0 and give its result, or its exception, to every rank. Both must pickle."""
    answer: list[T | Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            answer[0] = task()
        except Exception as error:
            answer[0] = error
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return cast(T, answer[0])


def lost_peer(error: RuntimeError) -> str | None:
    """What a failed collective says of another rank, in one line; None if the error is of another kind.

    gloo raises plain RuntimeErrors: "Connection closed by peer" of a rank that died, "Timed out" of one that hangs.
    """
    text = str(error)
    if not isinstance(error, dist.DistError) and not any(sign in text for sign in LOST_PEER):
        return None
    return "did not answer in time" if "imed out" in text else "ended"


def raise_everywhere(error: Exception | None) -> None:
    """Raise the first rank's error on all ranks, if any rank has one."""
    errors: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    if found := next(filter(None, errors), None):
        raise found
