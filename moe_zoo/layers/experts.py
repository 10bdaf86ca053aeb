"""The experts of one layer as stacked weights: no parameter is ever unused, however the tokens fall."""

import torch
from torch import Tensor, nn

from moe_zoo.ops.experts import batched_ffn, expert_ffn


class Experts(nn.Module):
    """``num_experts`` feed-forwards. ``w_up`` is (experts, d_model, d_ff), twice as wide if gated, gate first."""

    def __init__(self, num_experts: int, d_model: int, d_ff: int, activation: str, gated: bool):
        super().__init__()
        self.activation, self.gated = activation, gated
        self.w_up = nn.Parameter(torch.empty(num_experts, d_model, 2 * d_ff if gated else d_ff))
        self.w_down = nn.Parameter(torch.empty(num_experts, d_ff, d_model))

    def forward(self, x: Tensor, experts_TK: Tensor | None = None, weights_TK: Tensor | None = None) -> Tensor:
        """(T, D) -> the same shape: the weighted sum of each token's chosen experts.

        Without a choice, (experts, places, D) -> the same shape: each expert on its own places.
        """
        stacks, settings = (self.w_up, self.w_down), {"activation": self.activation, "gated": self.gated}
        if experts_TK is None:
            return batched_ffn(x, *stacks, **settings)
        return expert_ffn(x, experts_TK, weights_TK, *stacks, **settings)
