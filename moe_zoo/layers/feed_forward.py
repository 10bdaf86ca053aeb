"""The dense feed-forward layer, gated or not."""

from torch import Tensor, nn

from moe_zoo.ops.experts import Unit, activate


class FeedForward(nn.Module):
    """``act(x W_up) W_down``; gated: ``(act(x W_gate) * x W_up) W_down`` (GLU variants, arXiv:2002.05202)."""

    def __init__(self, d_model: int, d_ff: int, unit: Unit, bias: bool = False):
        super().__init__()
        self.unit = unit
        self.gate = nn.Linear(d_model, d_ff, bias=bias) if unit.gated else None
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., d_model) -> same."""
        gate, up = (self.up(hidden), None) if self.gate is None else (self.gate(hidden), self.up(hidden))
        return self.down(activate(gate, up, self.unit))
