"""The numbers of a feed-forward layer, dense or sparse."""

import math
from dataclasses import dataclass
from typing import Literal

from moe_zoo.spec.errors import RecipeError
from moe_zoo.spec.numbers import STRICT, check_one_of, check_positive


@dataclass(frozen=True, kw_only=True)
class FeedForwardSpec:
    """One FFN, dense or one expert: ``activation(x W_up) W_down``, or gated, ``(act(x W_gate) * x W_up) W_down``."""

    d_ff: int
    activation: Literal["relu", "gelu", "silu", "quick_gelu"] = "silu"  # the last: x sigmoid(1.702 x)
    gated: bool = True  # silu + gated = SwiGLU, gelu + gated = GEGLU, relu ungated = Switch
    bias: bool = False  # of all its matrices
    limit: float | None = None  # the gate is cut off above it, the up half above and below (gpt-oss)
    up_offset: float = 0.0  # added to the up half after that

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        check_positive(self, "d_ff", *(("limit",) if self.limit is not None else ()))
        check_one_of(self, "activation", ("relu", "gelu", "silu", "quick_gelu"))
        for name in ("limit", "up_offset"):
            if getattr(self, name) and not self.gated:
                raise RecipeError(
                    f"feed_forward.{name}: {getattr(self, name)}; belongs to a gated one; drop it, or set gated to true"
                )


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How tokens and experts find each other.

    ``softmax``, ``top_k = 1``, a capacity factor and jitter make the Switch router (arXiv:2101.03961);
    ``sigmoid`` with ``selection_bias``, ``normalize`` and groups that of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).
    With ``choice = "expert"`` each expert takes its best tokens of every row, ``top_k`` per token on average
    (arXiv:2202.09368): always balanced, but a token's route depends on later ones, so such a model cannot generate.

    ``zero_experts`` more are scored and chosen like all others, and give back what they get: no weights, no capacity, no
    travel (LongCat-Flash, arXiv:2509.01322). Balance is even over both kinds, so a token meets ``top_k * num_experts /
    num_scored`` with weights on average; as there, ``balance.method = bias`` moves the bias of these alone.
    """

    num_experts: int  # that have weights
    top_k: int = 1
    zero_experts: int = 0
    # sparsemixer: of each choice, a softmax over the experts that are not far behind it (arXiv:2409.12136, section 2.1)
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    tolerance: float = 0.0  # of sparsemixer: how far behind, as a share
    scales_input: bool = False  # the weight multiplies what an expert is given, not what it gives (Llama 4)
    normalize: bool = False  # chosen weights sum to one
    scale: float = 1.0  # multiplies the weights
    bias: bool = False  # of the logits, trained
    selection_bias: bool = False  # added to the scores for the choice alone; moved by balance.method = bias
    jitter: float = 0.0  # router input times uniform(1 - jitter, 1 + jitter) in training
    capacity_factor: float | None = None  # slots an expert takes per sequence, over the mean; None never drops
    eval_capacity_factor: float | None = None
    num_groups: int = 1  # equal runs of experts, of which a token chooses within its best
    groups_per_token: int = 1
    group_score: Literal["max", "top2"] = "max"  # of a group: its best expert's, or the sum of its two best
    # Who chooses. For experts a null capacity_factor means 1, and a null eval_capacity_factor the same as in training.
    choice: Literal["token", "expert"] = "token"

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        check_positive(self, "num_experts", "top_k", "scale")
        check_one_of(self, "score", ("softmax", "sigmoid", "sparsemixer"))
        if self.zero_experts < 0:
            raise RecipeError(f"router.zero_experts: {self.zero_experts}; must be at least 0; 0 has none")
        if self.top_k > self.num_scored:
            raise RecipeError(
                f"router.top_k: {self.top_k}; a token cannot choose more than num_experts = {self.num_scored}; lower it"
            )
        if not 0 <= self.jitter < 1:
            raise RecipeError(f"router.jitter: {self.jitter}; must be at least 0 and below 1; Switch uses 0.01")
        for name in ("capacity_factor", "eval_capacity_factor"):
            factor = getattr(self, name)
            if factor is not None and factor <= 0:
                raise RecipeError(f"router.{name}: {factor}; must be positive; null never drops a token")
        if self.scales_input and self.top_k > 1:
            raise RecipeError(
                f"router.scales_input: true; each of top_k = {self.top_k} choices would want an input of its own; set "
                f"top_k to 1"
            )
        self._check_groups()
        self._check_choice()
        plain = (self.choice, self.num_groups, self.scales_input) == ("token", 1, False)
        if self.zero_experts and not (plain and self.score != "sparsemixer"):
            raise RecipeError(
                f"router.zero_experts: {self.zero_experts}; are built where tokens choose among all experts by softmax or "
                f"sigmoid and weights scale outputs; set it to 0, or drop choice, num_groups, scales_input or sparsemixer"
            )
        if self.score == "sparsemixer" and (self.choice, self.num_groups, self.selection_bias) != ("token", 1, False):
            raise RecipeError(
                "router.score: sparsemixer; knows no groups, no selection_bias and no choice by experts; set score to softmax"
            )

    def _check_groups(self) -> None:
        check_positive(self, "num_groups", "groups_per_token")
        check_one_of(self, "group_score", ("max", "top2"))
        if self.num_experts % self.num_groups:
            raise RecipeError(
                f"router.num_groups: {self.num_groups}; must divide num_experts = {self.num_experts}; try "
                f"{math.gcd(self.num_groups, self.num_experts)}"
            )
        if self.groups_per_token > self.num_groups:
            raise RecipeError(
                f"router.groups_per_token: {self.groups_per_token}; there are num_groups = {self.num_groups}; lower it"
            )
        within_reach = self.groups_per_token * self.num_scored // self.num_groups
        if self.top_k > within_reach:
            raise RecipeError(
                f"router.top_k: {self.top_k}; the groups_per_token = {self.groups_per_token} groups of a token hold "
                f"{within_reach} experts; lower it, or raise groups_per_token"
            )

    def _check_choice(self) -> None:
        check_one_of(self, "choice", ("token", "expert"))
        if self.choice == "token":
            return
        for name, plain in (("selection_bias", False), ("num_groups", 1)):
            if getattr(self, name) != plain:
                raise RecipeError(
                    f"router.{name}: {str(getattr(self, name)).lower()}; says how tokens choose, here experts do; "
                    f"set it to {str(plain).lower()}, or choice to token"
                )

    @property
    def num_scored(self) -> int:
        """Experts among which a token chooses: those with weights and those without."""
        return self.num_experts + self.zero_experts

    def slots_per_token(self, seq_len: int) -> float:
        """Choices per token of a row: ``top_k``, or where experts choose what they take in all, rounded up for each."""
        if self.choice == "token":
            return self.top_k
        capacity = math.ceil((self.capacity_factor or 1.0) * seq_len * self.top_k / self.num_experts)
        return self.num_experts * capacity / seq_len


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """The sparse feed-forward of a model, and the layers that have one."""

    router: RouterSpec
    experts: FeedForwardSpec
    shared: FeedForwardSpec | None = None  # an expert that every token visits
    shared_gate: bool = False  # its output times sigmoid(w x) (Qwen2-MoE)
    dense_layers: tuple[int, ...] = ()  # layers that have no experts although their turn has come
    first_layer: int = 0  # first sparse layer
    every: int = 1  # sparse layers are first_layer, first_layer + every, ...

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        check_positive(self, "every")
        if self.shared_gate and self.shared is None:
            raise RecipeError(
                "moe.shared_gate: true; there is no shared expert to gate; describe moe.shared, or drop it"
            )
        if self.first_layer < 0:
            raise RecipeError(f"moe.first_layer: {self.first_layer}; layers count from 0; raise it")
