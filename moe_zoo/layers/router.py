"""The router: tokens choose their best experts, or experts their best tokens.

Letters: B rows, S positions, T = B*S tokens, D width, E experts that are scored, K choices, N slots.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_zoo.layers.rows import RowShare, WholeRows
from moe_zoo.ops.noise import uniform_noise
from moe_zoo.ops.routing import (
    GroupLimit,
    Scores,
    choose_experts,
    count_per_row,
    expert_capacity,
    score_experts,
    sparse_mixer,
    take_tokens,
    taken_slots,
    within_capacity,
)


class RouterStats(NamedTuple):
    """What a step needs to know of a router, summed per row. Gradient flows through ``prob_sums`` and ``z_sums``."""

    counts: Tensor  # (B, E) slots that chose each expert, dropped ones and experts without weights included
    prob_sums: Tensor  # (B, E) router probabilities, summed over the row
    z_sums: Tensor  # (B,) squared log-partition, summed over the row
    entropy_sums: Tensor  # (B,) entropy of the router's distribution in nats, summed over the row
    dropped: Tensor  # (B,) slots refused for want of capacity; K for each token that no choosing expert took


class Routing(NamedTuple):
    """Where every token goes. An expert index equal to the number of experts with weights means that nobody is visited.

    That slot was dropped, or it chose an expert without weights, of which ``kept_T`` knows.

    Where experts choose, a token has one row here per expert that took it: K is 1, and ``tokens_N`` says whose row it
    is. Dispatchers see copies of tokens and nothing new: B * capacity * E rows, as many as token choice has slots. (A
    column per expert would be simpler, and E / K times the rows.) Where rows are split each rank keeps room for all
    that an expert takes of a row, and what lies elsewhere is dropped.
    """

    weights_TK: Tensor
    experts_TK: Tensor
    stats: RouterStats
    num_places: int | None = None  # no expert has more slots of this rank than that; None: no capacity
    tokens_N: Tensor | None = None
    kept_T: Tensor | None = None  # weight with which a token comes back as it is; None: there are no such experts


class TopKRouter(nn.Module):
    """Send each token to its K best experts, or (``choice = "expert"``) each expert its best tokens of every row.

    Experts that choose are always full, so nothing has to be balanced (Zhou et al., arXiv:2202.09368); but a token's
    route then depends on later tokens of its row. Losses are flattered by that, and no cache can continue a text.

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
        zero_experts: int = 0,
        score: str = "softmax",
        tolerance: float = 0.0,
        scales_input: bool = False,
        normalize: bool = False,
        scale: float = 1.0,
        bias: bool = False,
        selection_bias: bool = False,
        jitter: float = 0.0,
        capacity_factor: float | None = None,
        eval_capacity_factor: float | None = None,
        num_groups: int = 1,
        groups_per_token: int = 1,
        group_score: str = "max",
        choice: str = "token",
        layer: int = 0,
    ):
        super().__init__()
        self.num_experts, self.top_k, self.layer = num_experts, top_k, layer
        self.zero_experts, self.num_scored = zero_experts, num_experts + zero_experts
        self.rows, self.choice = WholeRows(), choice
        self.score, self.normalize, self.scale, self.jitter = score, normalize, scale, jitter
        self.tolerance, self.scales_input = tolerance, scales_input
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.limit = GroupLimit(num_groups, groups_per_token, group_score) if num_groups > 1 else None
        self.weight = nn.Parameter(torch.empty(self.num_scored, d_model))
        self.bias = nn.Parameter(torch.empty(self.num_scored)) if bias else None
        moved = torch.zeros(self.num_scored, dtype=torch.float32) if selection_bias else None
        self.register_buffer("selection_bias", moved)

    def forward(self, hidden_BSD: Tensor, row_seeds: Tensor | None = None) -> Routing:
        """``row_seeds`` (B,) make the jitter of each row; without them there is none."""
        x_BSD = hidden_BSD.to(torch.promote_types(hidden_BSD.dtype, torch.float32))
        if self.jitter and row_seeds is not None:
            places = self.rows.places(x_BSD.shape[1], x_BSD.device)
            noise_BSD = uniform_noise(row_seeds, places, x_BSD.shape[2], salt=self.layer)
            x_BSD = x_BSD * (1 - self.jitter + 2 * self.jitter * noise_BSD)
        bias = None if self.bias is None else self.bias.to(x_BSD.dtype)
        logits_TE = F.linear(x_BSD, self.weight.to(x_BSD.dtype), bias).flatten(0, 1)
        scores = score_experts(logits_TE, self.score)
        decide = self._experts_choose if self.choice == "expert" else self._tokens_choose
        return decide(logits_TE, scores, len(hidden_BSD))

    def _tokens_choose(self, logits_TE: Tensor, scores: Scores, num_rows: int) -> Routing:
        weights_TK, chosen_TK = self._best(logits_TE, scores)
        visited_TK = chosen_TK.clamp_max(self.num_experts) if self.zero_experts else chosen_TK
        experts_TK, num_places = self._drop(visited_TK, num_rows)
        counts_BE = count_per_row(chosen_TK, num_rows, self.num_scored)
        dropped_B = (experts_TK != visited_TK).view(num_rows, -1).sum(1)
        stats = _stats(logits_TE, scores.probs_TE, counts_BE, dropped_B)
        kept_T = (weights_TK * (chosen_TK >= self.num_experts)).sum(-1) if self.zero_experts else None
        return Routing(weights_TK, experts_TK, stats, num_places, kept_T=kept_T)

    def _best(self, logits_TE: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        if self.score == "sparsemixer":
            return sparse_mixer(logits_TE, top_k=self.top_k, tolerance=self.tolerance)
        return choose_experts(
            scores.scores_TE,
            top_k=self.top_k,
            normalize=self.normalize,
            scale=self.scale,
            bias_E=self.selection_bias,
            limit=self.limit,
        )

    def _drop(self, experts_TK: Tensor, num_rows: int) -> tuple[Tensor, int | None]:
        factor = self._capacity_factor()
        if factor is None:
            return experts_TK, None
        experts_BSK = experts_TK.unflatten(0, (num_rows, -1))
        whole_BSK, own_S = self._whole_and_own(experts_BSK)
        capacity = expert_capacity(factor, whole_BSK.shape[1], self.top_k, self.num_scored)
        num_queues = self.num_experts + bool(self.zero_experts)  # the last: slots that visit nobody
        kept_BSK = _own_part(within_capacity(whole_BSK, num_queues, capacity), own_S)
        num_places = num_rows * min(capacity, len(own_S))  # a token chooses an expert once; all choices may lie here
        return experts_TK.where(kept_BSK.flatten(0, 1), self.num_experts), num_places

    def _experts_choose(self, logits_TE: Tensor, scores: Scores, num_rows: int) -> Routing:
        scores_BSE = scores.scores_TE.unflatten(0, (num_rows, -1))
        whole_BSE, own_S = self._whole_and_own(scores_BSE)
        factor = self._capacity_factor() or self.capacity_factor or 1.0  # without a limit nothing would be chosen
        capacity = expert_capacity(factor, whole_BSE.shape[1], self.top_k, self.num_experts)
        taken_BSE = _own_part(take_tokens(whole_BSE, capacity), own_S)
        own_capacity = min(capacity, len(own_S))
        slots = taken_slots(scores_BSE, taken_BSE, own_capacity, normalize=self.normalize, scale=self.scale)
        dropped_B = self.top_k * (~taken_BSE.any(-1)).sum(1)
        stats = _stats(logits_TE, scores.probs_TE, taken_BSE.sum(1), dropped_B)
        return Routing(
            slots.weights_N[:, None], slots.experts_N[:, None], stats, num_rows * own_capacity, slots.tokens_N
        )

    def _capacity_factor(self) -> float | None:
        return self.capacity_factor if self.training else self.eval_capacity_factor

    def _whole_and_own(self, x_BS: Tensor) -> tuple[Tensor, Tensor]:
        """The same of whole rows, and where the own part lies in them, (S,)."""
        return self.rows.gathered(x_BS), self.rows.places(x_BS.shape[1], x_BS.device)


def _own_part(decided_BS: Tensor, own_S: Tensor) -> Tensor:
    """What was decided of whole rows, for the own places; what lies behind a row is padding, and nobody takes it."""
    is_real_S = own_S < decided_BS.shape[1]
    return decided_BS[:, own_S.clamp_max(decided_BS.shape[1] - 1)] & is_real_S[:, None]


def _stats(logits_TE: Tensor, probs_TE: Tensor, counts_BE: Tensor, dropped_B: Tensor) -> RouterStats:
    num_rows, dtype = len(counts_BE), probs_TE.dtype
    entropy_T = torch.special.entr(probs_TE.detach()).sum(-1)
    return RouterStats(
        counts=counts_BE.to(dtype),
        prob_sums=probs_TE.unflatten(0, (num_rows, -1)).sum(1),
        z_sums=logits_TE.to(dtype).logsumexp(-1).square().view(num_rows, -1).sum(1),
        entropy_sums=entropy_T.view(num_rows, -1).sum(1),
        dropped=dropped_B.to(dtype),
    )
