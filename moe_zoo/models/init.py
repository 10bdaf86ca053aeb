"""Initial weights as a pure function of (seed, name, expert): the same in every layout, one tensor at a time."""

import hashlib

import torch
from torch import Tensor, nn

from moe_zoo.models.decoder import SparseDecoder, init_std


def initialize(model: SparseDecoder, seed: int) -> SparseDecoder:
    """Fill every parameter of a whole model in place."""
    for name, param in model.named_parameters():
        param.data.copy_(initial_slice(model, name, param, seed, first=0))
    return model


def initial_slice(model: SparseDecoder, name: str, param: nn.Parameter, seed: int, first: int) -> Tensor:
    """Initial fp32 values for the local slice ``param`` of ``name``, which begins at row ``first`` of dimension 0.

    An expert stack is drawn expert by expert, so a rank draws only its own; anything else is drawn whole.
    """
    std = init_std(name, model.architecture)
    if std is None:
        return torch.zeros(param.shape) if name.endswith("bias") else torch.ones(param.shape)
    if ".experts." not in name:
        assert first == 0, name
        return _normal(param.shape, std, seed, name)
    return torch.stack([_normal(param.shape[1:], std, seed, f"{name}[{first + e}]") for e in range(len(param))])


def _normal(shape: torch.Size, std: float, seed: int, name: str) -> Tensor:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    values = torch.empty(shape)
    return nn.init.trunc_normal_(values, std=std, a=-3 * std, b=3 * std, generator=generator)
