"""Learning rate as a pure function of the step: a resumed run needs no scheduler state."""

import math

from moe_zoo.spec.recipe import Optim


def learning_rate(spec: Optim, step: int, num_steps: int) -> float:
    """Rate of optimizer step ``step`` (from 0) of ``num_steps``: linear warmup, then the schedule.

    ``cosine`` falls over all that is left (SGDR, arXiv:1608.03983, eq. 5, one cycle); ``wsd`` is flat and falls
    linearly over the last ``decay_steps`` (MiniCPM, arXiv:2404.06395, section 4.2).
    """
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.lr
    if spec.schedule == "cosine":
        share = (step - spec.warmup_steps) / max(1, num_steps - spec.warmup_steps)
        height = (1 + math.cos(math.pi * share)) / 2
    else:
        height = min(1.0, (num_steps - step) / max(1, spec.decay_steps))
    return spec.lr * (spec.min_lr_ratio + (1 - spec.min_lr_ratio) * height)
