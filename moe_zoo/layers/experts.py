"""The experts of one layer as stacked weights: no parameter is ever unused, however the tokens fall."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_zoo.ops.experts import Stacks, Unit, batched_ffn, expert_ffn


class Experts(nn.Module):
    """``num_experts`` feed-forwards. ``w_up`` is (experts, d_model, d_ff), twice as wide if gated, gate first.

    Where experts are sliced over ranks each adds its run of the output's bias: ``bias_margins`` are zeros around it.
    """

    bias_margins: tuple[int, int]

    def __init__(self, num_experts: int, d_model: int, d_ff: int, unit: Unit, bias: bool = False):
        super().__init__()
        self.unit, self.bias_margins = unit, (0, 0)
        width = 2 * d_ff if unit.gated else d_ff
        self.w_up = nn.Parameter(torch.empty(num_experts, d_model, width))
        self.w_down = nn.Parameter(torch.empty(num_experts, d_ff, d_model))
        self.up_bias = nn.Parameter(torch.empty(num_experts, width)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, d_model)) if bias else None

    def forward(self, x: Tensor, experts_TK: Tensor | None = None, weights_TK: Tensor | None = None) -> Tensor:
        """(T, D) -> the same shape: the weighted sum of each token's chosen experts.

        Without a choice, (experts, places, D) -> the same shape: each expert on its own places.
        """
        down_bias = self.down_bias if self.bias_margins == (0, 0) else F.pad(self.down_bias, self.bias_margins)
        stacks = Stacks(self.w_up, self.w_down, self.up_bias, down_bias)
        if experts_TK is None:
            return batched_ffn(x, stacks, self.unit)
        return expert_ffn(x, experts_TK, weights_TK, stacks, self.unit)
