"""Recompute: keep a block's input alone and run its forward again in backward. Source: arXiv:1604.06174.

Exact by construction: a layer returns its statistics instead of keeping them, and noise is a function of coordinates,
so a second forward counts nothing twice and draws nothing new.
"""

from functools import partial

from torch.utils.checkpoint import checkpoint

from moe_zoo.parallel.build import RankStages


def recompute_blocks(module: RankStages, every: int) -> None:
    """Recompute blocks 0, ``every``, 2 ``every``, ... of the whole model, in place; 0 recomputes none."""
    for stage in module.stages.values():
        for layer, block in stage.layers.items():
            if every and int(layer) % every == 0:
                # ZeRO-3 has freed the weights by then: torch must not compare their shapes with those of the forward.
                block.forward = partial(checkpoint, block.forward, use_reentrant=False, determinism_check="none")
