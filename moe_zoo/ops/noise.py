"""Counter-based noise: a value depends on its coordinates alone, so every layout, resume and recompute sees the same.

Letters: B rows, S positions in a row, D width.
"""

import numpy as np
import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def uniform_noise(row_seeds: Tensor, places: Tensor, width: int, salt: int) -> Tensor:
    """Uniform fp32 values in [0, 1) of shape (B, S, width), one seed per row; ``salt`` names the layer.

    ``places`` (S,) are the positions in the row: any part of a row gets the values it has in the whole.
    """
    index_SD = places[:, None] * width + torch.arange(width, device=row_seeds.device)
    keys_B11 = _mix(_mix(row_seeds.long()) + salt)[:, None, None]
    return (_mix(keys_B11 ^ _mix(index_SD)) >> 8).float() * 2.0**-24


def row_seeds(seed: int, step: int, rows: np.ndarray) -> np.ndarray:
    """One 31-bit seed per row of the global batch, from (run seed, step, the row's place in the batch)."""
    stream = np.random.SeedSequence((seed, step)).generate_state(1, np.uint64)[0]
    with np.errstate(over="ignore"):
        mixed = (rows.astype(np.uint64) + stream) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(33)).astype(np.int64)


def _mix(x: Tensor) -> Tensor:
    """The 32-bit finaliser of MurmurHash3 (public domain, A. Appleby), on int64 tensors."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)
