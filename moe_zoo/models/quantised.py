"""Numbers of published checkpoints that are stored in fewer bits, back to what they stand for.

Letters: R rows, C columns, G groups of a row.
"""

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # one bit of sign, two of exponent, one of mantissa
MX_BIAS = 127  # of the shared exponents, stored as E8M0


def from_fp8_blocks(values_RC: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """FP8 values times the scale of their block, fp32. The last block of a row or column may be cut short.

    Source: DeepSeek-V3, arXiv:2412.19437, section 3.3.2; its weights come in blocks of 128 x 128.
    """
    rows, columns = values_RC.shape
    scales_RC = scales.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return values_RC.float() * scales_RC


def from_mxfp4(blocks: Tensor, exponents: Tensor) -> Tensor:
    """(..., R, G, 16) bytes of two numbers each, low half first, and (..., R, G) exponents -> (..., R, 32 G), fp32.

    Source: OCP Microscaling Formats v1.0, section 5.3.3: 32 E2M1 values share a power of two.
    """
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=blocks.device)
    pairs = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(table[pairs.int()], (exponents.int() - MX_BIAS)[..., None]).flatten(-2)
