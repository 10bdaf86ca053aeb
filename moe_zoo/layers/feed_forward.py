"""The dense feed-forward layer, gated or not."""

from torch import Tensor, nn

from moe_zoo.ops.experts import ACTIVATIONS


class FeedForward(nn.Module):
    """``act(x W_up) W_down``; gated: ``(act(x W_gate) * x W_up) W_down`` (GLU variants, arXiv:2002.05202)."""

    def __init__(self, d_model: int, d_ff: int, activation: str, gated: bool):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate = nn.Linear(d_model, d_ff, bias=False) if gated else None
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., d_model) -> same."""
        if self.gate is None:
            return self.down(self.activation(self.up(hidden)))
        return self.down(self.activation(self.gate(hidden)) * self.up(hidden))
