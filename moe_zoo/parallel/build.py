"""Build this rank's share of a model: on the meta device first, so that no rank ever holds the whole."""

from collections.abc import Callable, Iterable
from functools import reduce
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from moe_zoo.comm.mesh import Mesh
from moe_zoo.models.decoder import DecoderOutput, SparseDecoder
from moe_zoo.models.init import initial_values
from moe_zoo.parallel.context import split_rows
from moe_zoo.parallel.experts import spread_experts
from moe_zoo.parallel.placement import Placement, take
from moe_zoo.parallel.tensor import split_tensors
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.recipe import Parallel, Recipe
from moe_zoo.spec.stages import cut_stages

T = TypeVar("T")


class RankStages(nn.Module):
    """All pipeline stages of one rank: the one module that its engine owns. Without a pipeline: the model, stage 0."""

    def __init__(self, stages: dict[int, SparseDecoder]):
        super().__init__()
        self.stages = nn.ModuleDict({str(index): stage for index, stage in stages.items()})

    def forward(self, index: int, *inputs: Tensor | None) -> DecoderOutput:
        """Stage ``index`` on its inputs."""
        return self.stages[str(index)](*inputs)

    def global_names(self, named: Iterable[tuple[str, T]]) -> dict[str, T]:
        """Names in the whole model for what ``named_parameters`` or ``named_buffers`` of this module gives."""
        return {name.split(".", 2)[2]: value for name, value in named}


class PlacedModel(NamedTuple):
    """Modules of plain local tensors, and for each parameter name what it is a slice of."""

    module: RankStages
    placements: dict[str, Placement]


def build_model(recipe: Recipe, mesh: Mesh, seed: int) -> PlacedModel:
    """This rank's share of the recipe's model with its initial weights, a pure function of (architecture, seed)."""
    architecture = recipe.model
    cuts = cut_stages(architecture, mesh.layout.num_stages, recipe.data.seq_len)
    stages, placements = {}, {}
    for index in mesh.layout.stages_of(mesh.pp_rank):
        with torch.device("meta"):
            stages[index] = SparseDecoder(architecture, cuts[index])
        placements |= split(stages[index], mesh, recipe.parallel)
        materialize(stages[index], _initial(architecture, placements, seed), mesh.device)
    return PlacedModel(RankStages(stages), placements)


def split(model: SparseDecoder, mesh: Mesh, parallel: Parallel) -> dict[str, Placement]:
    """Edit a model on the meta device into this rank's share; the weights to fill in are described, not cut."""
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    slices = spread_experts(model, mesh) | split_tensors(model, mesh)
    split_rows(model, mesh, parallel.context)
    return {
        name: Placement(_whole_name(name, model), shape, *slices.get(name, ("stage", ())))
        for name, shape in shapes.items()
    }


def _whole_name(name: str, model: SparseDecoder) -> str:
    """The head of a last stage whose embedding stands in the first is a copy of it."""
    is_copy = name == "head.weight" and model.architecture.tie_embeddings
    return "embed.weight" if is_copy else name


def _initial(architecture: Architecture, placements: dict[str, Placement], seed: int) -> Callable[[str], Tensor]:
    def fill(name: str) -> Tensor:
        placement = placements[name]
        cuts, experts = placement.cuts, None
        if ".experts." in name and cuts and cuts[0].dim == 0:
            size, cuts = placement.local_shape[0], cuts[1:]
            experts = range(placement.cuts[0].index * size, (placement.cuts[0].index + 1) * size)
        values = initial_values(architecture, placement.name, placement.shape, seed, experts)
        return reduce(take, cuts, values).contiguous()

    return fill


def materialize(model: nn.Module, fill: Callable[[str], Tensor], device: torch.device) -> None:
    """Replace every meta parameter by ``fill(name)`` once, tied ones included; buffers start at zero."""
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if id(param) not in made:
                made[id(param)] = nn.Parameter(fill(f"{path}.{name}".lstrip(".")).to(device))
            setattr(module, name, made[id(param)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros_like(buffer, device=device))
