"""Build this rank's share of a model: on the meta device first, so that no rank ever holds the whole."""

from collections.abc import Callable, Iterable
from functools import reduce
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from moe_zoo.comm.mesh import Mesh
from moe_zoo.layers.dispatch import make_dispatcher
from moe_zoo.layers.moe import MoELayer
from moe_zoo.models.decoder import DecoderOutput, SparseDecoder
from moe_zoo.models.init import initial_values
from moe_zoo.parallel.placement import Cut, Placement, take
from moe_zoo.spec.architecture import Architecture
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


def build_model(architecture: Architecture, mesh: Mesh, seed: int, seq_len: int = 1) -> PlacedModel:
    """This rank's share with its initial weights: a pure function of (architecture, seed), cut by the mesh.

    ``seq_len`` weighs attention when the model is cut in stages.
    """
    cuts = cut_stages(architecture, mesh.layout.num_stages, seq_len)
    stages, placements = {}, {}
    for index in mesh.layout.stages_of(mesh.pp_rank):
        with torch.device("meta"):
            stages[index] = SparseDecoder(architecture, cuts[index])
        placements |= shard_experts(stages[index], mesh)
        materialize(stages[index], _initial(stages[index], placements, seed), mesh.device)
    return PlacedModel(RankStages(stages), placements)


def _initial(model: SparseDecoder, placements: dict[str, Placement], seed: int) -> Callable[[str, Tensor], Tensor]:
    def fill(name: str, _: Tensor) -> Tensor:
        placement = placements[name]
        first, *others = placement.cuts if ".experts." in name and placement.cuts else (None, *placement.cuts)
        size = placement.local_shape[0]
        experts = range(first.index * size, (first.index + 1) * size) if first else None
        values = initial_values(model.architecture, placement.name, placement.shape, seed, experts)
        return reduce(take, others, values).contiguous()

    return fill


def shard_experts(model: SparseDecoder, mesh: Mesh) -> dict[str, Placement]:
    """Cut every expert stack to this rank's experts, in place, and route through the network."""
    is_split = mesh.ep > 1
    placements = {}
    for name, param in model.named_parameters():
        if is_split and ".experts." in name:
            placements[name] = Placement(name, tuple(param.shape), "ep", (Cut(0, mesh.ep, mesh.ep_rank),))
        else:
            placements[name] = Placement(name, tuple(param.shape), "stage")
    group = mesh.ep_group if is_split else None
    for layer in filter(lambda module: isinstance(module, MoELayer), model.modules()):
        layer.dispatcher = make_dispatcher(mesh.layout.dispatch, layer.router.num_experts, group=group)
        if is_split:
            for name, stack in list(layer.experts.named_parameters()):
                setattr(layer.experts, name, nn.Parameter(stack.chunk(mesh.ep)[mesh.ep_rank]))
    return placements


def materialize(model: nn.Module, fill: Callable[[str, Tensor], Tensor], device: torch.device) -> None:
    """Replace every meta parameter by ``fill(name, parameter)`` once, tied ones included; buffers start at zero."""
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if id(param) not in made:
                made[id(param)] = nn.Parameter(fill(f"{path}.{name}".lstrip("."), param).to(device))
            setattr(module, name, made[id(param)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros_like(buffer, device=device))
