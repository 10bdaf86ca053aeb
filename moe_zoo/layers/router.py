"""Token-choice top-k router. Letters: B rows, S positions, T = B*S tokens, D width, E experts, K choices."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_zoo.layers.rows import RowShare, WholeRows
from moe_zoo.ops.noise import uniform_noise
from moe_zoo.ops.routing import choose_experts, count_per_row, expert_capacity, within_capacity


class RouterStats(NamedTuple):
    """What a step needs to know of a router, summed per row. Gradient flows through ``prob_sums`` and ``z_sums``."""

    counts: Tensor  # (B, E) slots that chose each expert, dropped ones included
    prob_sums: Tensor  # (B, E) router probabilities, summed over the row
    z_sums: Tensor  # (B,) squared log-partition, summed over the row
    entropy_sums: Tensor  # (B,) entropy of the router's distribution in nats, summed over the row
    dropped: Tensor  # (B,) slots refused for want of capacity


class Routing(NamedTuple):
    """Where every token goes. An expert index equal to the number of experts means dropped."""

    weights_TK: Tensor
    experts_TK: Tensor
    stats: RouterStats


class TopKRouter(nn.Module):
    """Send each token to its K best experts.

    The gate runs in fp32 whatever the model's dtype: a bf16 softmax over thousands of experts cannot tell neighbours
    apart (Switch, arXiv:2101.03961, section 2.4). The module owns its weight directly, and uses it in its own
    forward, as ZeRO-3 demands. ``moe_zoo.parallel`` swaps ``rows`` where rows are split over ranks.
    """

    rows: RowShare

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int = 1,
        *,
        score: str = "softmax",
        normalize: bool = False,
        scale: float = 1.0,
        selection_bias: bool = False,
        jitter: float = 0.0,
        capacity_factor: float | None = None,
        eval_capacity_factor: float | None = None,
        layer: int = 0,
    ):
        super().__init__()
        self.num_experts, self.top_k, self.layer = num_experts, top_k, layer
        self.rows = WholeRows()
        self.score, self.normalize, self.scale, self.jitter = score, normalize, scale, jitter
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))
        bias = torch.zeros(num_experts, dtype=torch.float32) if selection_bias else None
        self.register_buffer("selection_bias", bias)

    def forward(self, hidden_BSD: Tensor, row_seeds: Tensor | None = None) -> Routing:
        """``row_seeds`` (B,) make the jitter of each row; without them there is none."""
        x_BSD = hidden_BSD.to(torch.promote_types(hidden_BSD.dtype, torch.float32))
        if self.jitter and row_seeds is not None:
            places = self.rows.places(x_BSD.shape[1], x_BSD.device)
            noise_BSD = uniform_noise(row_seeds, places, x_BSD.shape[2], salt=self.layer)
            x_BSD = x_BSD * (1 - self.jitter + 2 * self.jitter * noise_BSD)
        logits_TE = F.linear(x_BSD, self.weight.to(x_BSD.dtype)).flatten(0, 1)
        choice = choose_experts(
            logits_TE,
            top_k=self.top_k,
            score=self.score,
            normalize=self.normalize,
            scale=self.scale,
            bias_E=self.selection_bias,
        )
        num_rows = len(hidden_BSD)
        experts_TK = self._drop(choice.experts_TK, num_rows)
        return Routing(choice.weights_TK, experts_TK, self._stats(logits_TE, choice, experts_TK, num_rows))

    def _drop(self, experts_TK: Tensor, num_rows: int) -> Tensor:
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        if factor is None:
            return experts_TK
        experts_BSK = experts_TK.unflatten(0, (num_rows, -1))
        whole_BSK = self.rows.gathered(experts_BSK)
        capacity = expert_capacity(factor, whole_BSK.shape[1], self.top_k, self.num_experts)
        kept_BSK = within_capacity(whole_BSK, self.num_experts, capacity)
        own_BSK = kept_BSK[:, self.rows.places(experts_BSK.shape[1], experts_TK.device)]
        return experts_TK.where(own_BSK.flatten(0, 1), self.num_experts)

    def _stats(self, logits_TE, choice, experts_TK, num_rows: int) -> RouterStats:
        logits_TE = logits_TE.to(choice.probs_TE.dtype)
        probs_TE = choice.probs_TE.detach()
        entropy_T = torch.special.entr(probs_TE).sum(-1)
        return RouterStats(
            counts=count_per_row(choice.experts_TK, num_rows, self.num_experts).to(probs_TE.dtype),
            prob_sums=choice.probs_TE.unflatten(0, (num_rows, -1)).sum(1),
            z_sums=logits_TE.logsumexp(-1).square().view(num_rows, -1).sum(1),
            entropy_sums=entropy_T.view(num_rows, -1).sum(1),
            dropped=(experts_TK == self.num_experts).view(num_rows, -1).sum(1).to(probs_TE.dtype),
        )
