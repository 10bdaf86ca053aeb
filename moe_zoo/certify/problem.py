"""What the oracle and the ranks are both given: a small recipe, its tokens, and routers that leave experts idle."""

from typing import NamedTuple

import torch
from torch import Tensor

from moe_zoo.comm.mesh import Mesh
from moe_zoo.engines import MicroBatch
from moe_zoo.layers.router import TopKRouter
from moe_zoo.ops.documents import unpack_rows
from moe_zoo.spec.layout import ParallelLayout, resolve_layout
from moe_zoo.spec.recipe import Recipe
from moe_zoo.spec.topology import ranks_per_domain

BOS = 1
FAINT = 1e-4


def layout_of(recipe: Recipe, world: int) -> ParallelLayout:
    """Without a cluster file the ranks are one node; where tokens are to cross nodes, two."""
    nodes = 2 if recipe.parallel.dispatch == "hierarchical" else 1
    return resolve_layout(recipe, world, ranks_per_domain(recipe, world // nodes))


class Problem(NamedTuple):
    """A few steps of a recipe. The last ``num_idle`` experts of each layer get no token in the first."""

    recipe: Recipe
    num_idle: int


def step_rows(recipe: Recipe, step: int) -> tuple[Tensor, Tensor]:
    """((rows, seq + 1) tokens, (rows,) seeds of their jitter) of a global batch; documents make ragged targets."""
    generator = torch.Generator().manual_seed(1000 * recipe.train.seed + step)
    shape = (recipe.train.global_batch, recipe.data.seq_len + 1)
    tokens = torch.randint(BOS + 1, recipe.model.vocab_size, shape, generator=generator)
    tokens = tokens.masked_fill(torch.rand(shape, generator=generator) < 0.15, BOS)
    return tokens, torch.arange(shape[0]) + 100 * step


def own_rows(recipe: Recipe, mesh: Mesh, step: int) -> list[MicroBatch]:
    """This rank's part of a global batch: cut in micro-batches first, ranks second."""
    cut = (recipe.train.micro_batches, mesh.dp, -1)
    tokens, seeds = (rows.unflatten(0, cut)[:, mesh.dp_rank] for rows in step_rows(recipe, step))
    length = recipe.data.encoder_len
    return [MicroBatch(unpack_rows(rows, BOS, length), ids) for rows, ids in zip(tokens, seeds, strict=True)]


def routers(model: torch.nn.Module) -> list[TopKRouter]:
    """In the order of the layers."""
    return [module for module in model.modules() if isinstance(module, TopKRouter)]


@torch.no_grad()
def leave_experts_idle(model: torch.nn.Module, num_idle: int) -> None:
    """Of u, -u, v, -v two logits are above those of the last experts, which are next to zero, and no two alike.

    Equal ones would get equal gradients, and later tie: then rounding would choose.
    """
    for router in routers(model):
        pairs = num_pairs(router.top_k)
        assert 2 * pairs + num_idle <= router.num_experts
        router.weight[1 : 2 * pairs : 2] = -router.weight[0 : 2 * pairs : 2]
        faint = FAINT * torch.arange(1, num_idle + 1)[:, None]
        router.weight[router.num_experts - num_idle : router.num_experts] = faint * router.weight[0]


def num_pairs(top_k: int) -> int:
    """Pairs of opposite experts that keep the others out of a token's ``top_k``."""
    return max(2, top_k)
