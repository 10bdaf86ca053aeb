"""Recompute: keep a module's input alone and run its forward again in backward. Source: arXiv:1604.06174.

Exact by construction: a layer returns its statistics instead of keeping them, and noise is a function of coordinates,
so a second forward counts nothing twice and draws nothing new.
"""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_zoo.layers.attention import GroupedQueryAttention
from moe_zoo.layers.feed_forward import FeedForward
from moe_zoo.layers.latent_attention import LatentAttention
from moe_zoo.layers.relative import RelativeAttention
from moe_zoo.parallel.build import RankStages


def recompute_blocks(module: RankStages, what: int | str) -> None:
    """Edit a model in place. A number recomputes blocks 0, n, 2 n, ... of the whole model; 0 none.

    ``selective``: attention and dense feed-forwards of every block. Experts are left out, so that no token crosses the
    network a second time.
    """
    for stage in module.stages.values():
        for layer, block in stage.layers.items():
            if what == "selective":
                for part in filter(_is_dense, block.modules()):
                    _run_twice(part)
            elif what and int(layer) % what == 0:
                _run_twice(block)


def _is_dense(module: nn.Module) -> bool:
    return isinstance(module, GroupedQueryAttention | LatentAttention | RelativeAttention | FeedForward)


def _run_twice(module: nn.Module) -> None:
    # ZeRO-3 has freed the weights by then: torch must not compare their shapes with those of the forward.
    module.forward = partial(checkpoint, module.forward, use_reentrant=False, determinism_check="none")
