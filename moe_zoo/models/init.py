"""Initial weights as a pure function of (seed, name, expert): the same in every layout, one tensor at a time."""

import hashlib

import torch
from torch import Tensor, nn

from moe_zoo.models.decoder import init_std
from moe_zoo.models.switch import Network
from moe_zoo.spec.architecture import Architecture


def initialize(model: Network, seed: int) -> Network:
    """Fill every parameter of a whole model in place."""
    for name, param in model.named_parameters():
        param.data.copy_(initial_values(model.architecture, name, param.shape, seed))
    return model


def initial_values(
    architecture: Architecture, name: str, shape: tuple[int, ...], seed: int, experts: range | None = None
) -> Tensor:
    """Initial fp32 values of parameter ``name`` of a whole model, of some ``experts`` alone where it is a stack.

    A stack is drawn expert by expert, so a rank draws only its own; anything else is drawn whole.
    """
    std, is_stack = init_std(name, architecture), ".experts." in name
    if std is None:
        shape = (len(experts), *shape[1:]) if is_stack and experts is not None else shape
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    if not is_stack:
        return _normal(shape, std, seed, name)
    return torch.stack([_normal(shape[1:], std, seed, f"{name}[{e}]") for e in experts or range(shape[0])])


def _normal(shape: tuple[int, ...], std: float, seed: int, name: str) -> Tensor:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    values = torch.empty(shape)
    return nn.init.trunc_normal_(values, std=std, a=-3 * std, b=3 * std, generator=generator)
