"""Where a rank is: what is said of it when it waits in vain."""

import time

from torch import Tensor, nn

from moe_zoo.parallel.build import RankStages


class Position:
    """The module that a rank was in last, and on which way. Written by hooks, read when something hangs."""

    def __init__(self):
        self.place, self.moved_at = "before the first layer", time.monotonic()

    def move(self, place: str) -> None:
        """The rank is at ``place`` now."""
        self.place, self.moved_at = place, time.monotonic()


def follow(module: RankStages) -> Position:
    """A position that follows every forward and backward of the layers from now on."""
    position = Position()
    for stage in module.stages.values():
        named = {"embedding": stage.embed, "head": stage.head} | {f"layer {i}": b for i, b in stage.layers.items()}
        for name, part in named.items():
            if part is not None:
                _follow_part(part, name, position)
    return position


def _follow_part(part: nn.Module, name: str, position: Position) -> None:
    def begin_backward(grad: Tensor) -> None:
        position.move(f"the backward of {name}")

    def end_forward(_, __, output) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if output.requires_grad:  # a gradient arrives here when everything behind the layer is done
            output.register_hook(begin_backward)

    part.register_forward_pre_hook(lambda *_: position.move(f"the forward of {name}"))
    part.register_forward_hook(end_forward)
