"""Build this rank's share of a model: on the meta device first, so that no rank ever holds the whole."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_zoo.comm.mesh import Mesh
from moe_zoo.layers.dispatch import AllToAllDispatcher
from moe_zoo.layers.moe import MoELayer
from moe_zoo.models.decoder import SparseDecoder
from moe_zoo.models.init import initial_slice
from moe_zoo.parallel.placement import Placement
from moe_zoo.spec.architecture import Architecture


class PlacedModel(NamedTuple):
    """A module of plain local tensors, and for each parameter name what it is a slice of."""

    module: SparseDecoder
    placements: dict[str, Placement]


def build_model(architecture: Architecture, mesh: Mesh, seed: int) -> PlacedModel:
    """This rank's share with its initial weights: a pure function of (architecture, seed), cut by the mesh."""
    with torch.device("meta"):
        model = SparseDecoder(architecture)
    placements = shard_experts(model, mesh)

    def fill(name: str, param: Tensor) -> Tensor:
        placement = placements[name]
        return initial_slice(model, name, param, seed, first=placement.index * placement.rows).to(mesh.device)

    materialize(model, fill, mesh.device)
    return PlacedModel(model, placements)


def shard_experts(model: SparseDecoder, mesh: Mesh) -> dict[str, Placement]:
    """Cut every expert stack to this rank's experts, in place, and route through the network."""
    is_split = mesh.ep > 1
    placements = {}
    for name, param in model.named_parameters():
        kind = "ep" if is_split and ".experts." in name else "stage"
        parts, index = mesh.slice_of(kind)
        placements[name] = Placement(name, tuple(param.shape), kind, parts, index)
    for layer in filter(lambda module: isinstance(module, MoELayer), model.modules()):
        if is_split:
            layer.dispatcher = AllToAllDispatcher(layer.router.num_experts, mesh.ep_group)
            for name, stack in list(layer.experts.named_parameters()):
                setattr(layer.experts, name, nn.Parameter(stack.chunk(mesh.ep)[mesh.ep_rank]))
    return placements


def materialize(model: nn.Module, fill: Callable[[str, Tensor], Tensor], device: torch.device) -> None:
    """Replace every meta parameter by ``fill(name, parameter)`` once, tied ones included; buffers start at zero."""
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if id(param) not in made:
                made[id(param)] = nn.Parameter(fill(f"{path}.{name}".lstrip("."), param))
            setattr(module, name, made[id(param)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros_like(buffer, device=device))
