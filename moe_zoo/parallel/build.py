"""Build this rank's share of a model: on the meta device first, so that no rank ever holds the whole."""

from collections.abc import Callable, Iterable
from functools import reduce
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from moe_zoo.comm.mesh import Mesh
from moe_zoo.models.decoder import DecoderOutput
from moe_zoo.models.init import initial_values
from moe_zoo.models.source import Source
from moe_zoo.models.switch import Network, make_network
from moe_zoo.parallel.context import split_rows
from moe_zoo.parallel.experts import spread_experts
from moe_zoo.parallel.placement import Cut, Placement, take
from moe_zoo.parallel.tensor import split_tensors
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.errors import CheckpointError
from moe_zoo.spec.recipe import Parallel, Recipe
from moe_zoo.spec.stages import cut_stages

T = TypeVar("T")
Fill = Callable[[str, Tensor], Tensor]  # (name, what stands there on the meta device) -> its values


class RankStages(nn.Module):
    """All pipeline stages of one rank: the one module that its engine owns. Without a pipeline: the model, stage 0."""

    def __init__(self, stages: dict[int, Network]):
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


def build_model(recipe: Recipe, mesh: Mesh, seed: int, source: Source | None = None) -> PlacedModel:
    """This rank's share of the recipe's model with its first weights.

    They are a pure function of (architecture, seed), or with a ``source`` of that architecture this rank's slices of
    what it holds: one tensor of a file is in memory beside them.
    """
    architecture = recipe.model
    cuts = cut_stages(architecture, mesh.layout.num_stages, recipe.data.seq_len, recipe.data.encoder_len or 0)
    stages, placements = {}, {}
    for index in mesh.layout.stages_of(mesh.pp_rank):
        with torch.device("meta"):
            stages[index] = make_network(architecture, cuts[index])
        placements |= split(stages[index], mesh, recipe.parallel)
        fill = _initial(architecture, placements, seed) if source is None else _stored(source, placements)
        materialize(stages[index], fill, mesh.device)
    return PlacedModel(RankStages(stages), placements)


def split(model: Network, mesh: Mesh, parallel: Parallel) -> dict[str, Placement]:
    """Edit a model on the meta device into this rank's share; the weights to fill in are described, not cut."""
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    slices = spread_experts(model, mesh) | split_tensors(model, mesh)
    split_rows(model, mesh, parallel.context)
    return {
        name: Placement(_whole_name(name, model), shape, *slices.get(name, ("stage", ())))
        for name, shape in shapes.items()
    }


def _whole_name(name: str, model: Network) -> str:
    """The head of a last stage whose embedding stands in the first is a copy of it."""
    is_copy = name == "head.weight" and model.architecture.tie_embeddings
    return "embed.weight" if is_copy else name


def _initial(architecture: Architecture, placements: dict[str, Placement], seed: int) -> Fill:
    def fill(name: str, meta: Tensor) -> Tensor:
        if name not in placements:
            return torch.zeros_like(meta, device="cpu")
        placement = placements[name]
        experts, cuts = _own_experts(name, placement)
        values = initial_values(architecture, placement.name, placement.shape, seed, experts)
        return reduce(take, cuts, values).contiguous()

    return fill


def _stored(source: Source, placements: dict[str, Placement]) -> Fill:
    def fill(name: str, meta: Tensor) -> Tensor:
        placement = placements.get(name)
        if placement is None:
            return source.values(name).to(meta.dtype)
        experts, cuts = _own_experts(name, placement)
        if ".experts." in name:  # the source cuts one expert at a time
            cuts = tuple(cut._replace(dim=cut.dim - 1) for cut in cuts)
        values = source.values(placement.name, experts, lambda whole: reduce(take, cuts, whole).float())
        if values.shape != placement.local_shape:
            raise CheckpointError(
                f"init: {source.where(placement.name)}: shape {tuple(values.shape)} of this rank's slice of "
                f"{placement.name}; the recipe's model has {placement.local_shape}; one of the two is another model's"
            )
        return values.contiguous()

    return fill


def _own_experts(name: str, placement: Placement) -> tuple[range | None, tuple[Cut, ...]]:
    """(which experts of a stack are here, None: all or it is no stack; the cuts that are left)."""
    if ".experts." not in name or not placement.cuts or placement.cuts[0].dim != 0:
        return None, placement.cuts
    size, index = placement.local_shape[0], placement.cuts[0].index
    return range(index * size, (index + 1) * size), placement.cuts[1:]


def materialize(model: nn.Module, fill: Fill, device: torch.device) -> None:
    """Replace every meta parameter and buffer by ``fill(name, itself)`` once, tied parameters included."""
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if id(param) not in made:
                made[id(param)] = nn.Parameter(fill(f"{path}.{name}".lstrip("."), param).to(device))
            setattr(module, name, made[id(param)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, fill(f"{path}.{name}".lstrip("."), buffer).to(device))
