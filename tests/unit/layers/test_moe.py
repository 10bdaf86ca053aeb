"""The sparse layer on one device equals the slow twin, values and gradients, whoever chooses and however it is sent."""

import pytest
import torch

from moe_zoo.layers.dispatch import make_dispatcher
from moe_zoo.layers.experts import Experts
from moe_zoo.layers.moe import MoELayer
from moe_zoo.layers.router import TopKRouter
from moe_zoo.ops import reference
from moe_zoo.ops.experts import Stacks, Unit

B, S, D, F, E, K = 3, 7, 5, 4, 6, 2
TOLERANCE = 1e-12  # float64: sums of some dozens of products in another order

KINDS = ["exact", "padded"]
ROUTERS = {
    "dropless": {},
    "switch": {"capacity_factor": 0.5},
    "all in one": {"capacity_factor": 1.0, "selection_bias": True},
    "groups": {"score": "sigmoid", "num_groups": 3, "groups_per_token": 1, "group_score": "top2", "normalize": True},
    "some without weights": {"zero_experts": 3, "scale": 2.0},
    "some without weights or capacity": {"zero_experts": 2, "selection_bias": True, "capacity_factor": 0.9},
    "experts": {"choice": "expert"},
    "few": {"choice": "expert", "capacity_factor": 0.4, "score": "sigmoid", "normalize": True, "scale": 2.0},
    "all": {"choice": "expert", "capacity_factor": float(E)},
}


def layer(kind: str = "exact", **router) -> MoELayer:
    made = MoELayer(TopKRouter(D, E, K, **router), Experts(E, D, F, Unit("silu", True), bias=True)).double()
    made.dispatcher = make_dispatcher(kind, E)
    generator = torch.Generator().manual_seed(7)
    for param in made.parameters():
        param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64)
    if made.router.selection_bias is not None:
        made.router.selection_bias[:2] = 9.0  # far too many for two experts
    return made


def tokens() -> torch.Tensor:
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(8), dtype=torch.float64).requires_grad_()


def slow(moe: MoELayer, hidden: torch.Tensor) -> torch.Tensor:
    """The layer of its weights, one token and one choice at a time."""
    router = moe.router
    logits = hidden.flatten(0, 1) @ router.weight.t()
    if router.choice == "expert":
        weights, chosen = slow_expert_choice(router, logits)
    else:
        limit = (1, 1, "max") if router.limit is None else tuple(router.limit)
        settings = {name: getattr(router, name) for name in ("top_k", "score", "normalize", "scale")}
        rows = [reference.choose(row, bias=router.selection_bias, groups=limit, **settings) for row in logits]
        chosen, weights = [row[0] for row in rows], torch.stack([torch.stack(row[1]) for row in rows])
        chosen = torch.tensor(chosen).view(B, S, K)
        if router.capacity_factor is not None:
            dropped = reference.drop(chosen.tolist(), router.num_scored, router.capacity_factor, router.zero_experts)
            chosen = torch.tensor(dropped)
        chosen = chosen.flatten(0, 1)
    stacks = [getattr(moe.experts, name) for name in Stacks._fields]
    how = (stacks, moe.experts.unit, router.zero_experts)
    return reference.experts(hidden.flatten(0, 1), chosen, weights, *how).view_as(hidden)


def slow_expert_choice(router: TopKRouter, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token with a column per expert, most of them dropped."""
    scores = logits.softmax(-1) if router.score == "softmax" else logits.sigmoid()
    taken = reference.take(scores.detach().view(B, S, E), K, router.capacity_factor or 1.0).flatten(0, 1)
    total = (scores * taken).sum(-1, keepdim=True).clamp_min(1e-20) if router.normalize else 1.0
    return router.scale * scores / total, torch.arange(E).where(taken, E)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ROUTERS)
def test_the_layer_equals_the_slow_one(name, kind):
    moe, hidden = layer(kind, **ROUTERS[name]), tokens()
    found, truth = moe(hidden, None)[0], slow(moe, hidden)
    torch.testing.assert_close(found, truth, atol=TOLERANCE, rtol=0)
    leaves = [hidden, *moe.parameters()]
    seed = hidden.detach().cos()
    for ours, theirs in zip(*(torch.autograd.grad(out, leaves, seed) for out in (found, truth)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
        assert ours.abs().sum() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_who_chooses_an_expert_without_weights_is_counted_and_not_dropped(kind):
    moe, hidden = layer(kind, zero_experts=3, capacity_factor=0.5), tokens()
    moe.router.weight.data[:E] = 0  # whoever likes an expert without weights more than none at all chooses those
    update, stats = moe(hidden, None)
    likes = (hidden @ moe.router.weight[E:].t() > 0).sum(-1).clamp_max(K)
    assert torch.equal(stats.counts[:, E:].sum(1), likes.sum(1).double())
    assert torch.equal(stats.counts.sum(1), torch.full((B,), S * K, dtype=torch.float64))
    capacity = 1  # ceil(0.5 * 7 * 2 / 9)
    assert torch.equal(stats.dropped, (stats.counts[:, :E] - capacity).clamp_min(0).sum(1)) and stats.dropped.sum() > 0
    alone = likes == K
    weights = (hidden @ moe.router.weight.t()).softmax(-1).topk(K).values.sum(-1, keepdim=True)
    torch.testing.assert_close(update[alone], (hidden * weights)[alone], atol=TOLERANCE, rtol=0)
    assert alone.any()


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_that_drops_nobody_is_right_in_every_way(kind):
    moe, hidden = layer(kind, **ROUTERS["all in one"]), tokens()
    dropless = layer("exact", selection_bias=True)
    assert not torch.equal(moe(hidden, None)[0], dropless(hidden, None)[0])
    torch.testing.assert_close(moe.eval()(hidden, None)[0], dropless(hidden, None)[0], atol=TOLERANCE, rtol=0)


def test_experts_that_choose_take_equally_many_and_tell_whom_nobody_took():
    moe, hidden = layer(**ROUTERS["few"]), tokens()
    stats = moe(hidden, None)[1]
    taken = reference.take((hidden @ moe.router.weight.t()).sigmoid(), K, 0.4)
    assert torch.equal(stats.counts, torch.ones(B, E, dtype=torch.float64))  # ceil(0.4 * 7 * 2 / 6)
    assert torch.equal(stats.dropped, K * (~taken.any(-1)).sum(1).double()) and stats.dropped.sum() > 0


def test_experts_choose_in_an_evaluation_as_in_training_unless_told_otherwise():
    hidden = tokens()
    same, other = layer(choice="expert", capacity_factor=2.0), layer(choice="expert", eval_capacity_factor=2.0)
    trained = same(hidden, None)[0]
    assert not torch.equal(trained, other(hidden, None)[0])
    assert torch.equal(same.eval()(hidden, None)[0], trained)
    assert torch.equal(other.eval()(hidden, None)[0], trained)


class PartOfRows:
    """Every other token of each row; ``whole`` are the rows that a collective would bring together."""

    def __init__(self, part: int, whole: torch.Tensor):
        self.part, self.whole = part, whole

    def places(self, num_local: int, device: torch.device) -> torch.Tensor:
        return torch.arange(S)[self.part :: 2]

    def gathered(self, x_BS: torch.Tensor) -> torch.Tensor:
        return self.whole


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["experts", "few", "all", "switch", "all in one", "some without weights or capacity"])
def test_rows_split_over_ranks_are_routed_as_whole_ones(name, kind):
    moe, hidden = layer(kind, **ROUTERS[name]), tokens().detach()
    truth, stats = moe(hidden, None)
    logits = hidden @ moe.router.weight.t()
    if moe.router.choice == "expert":
        whole = logits.softmax(-1) if moe.router.score == "softmax" else logits.sigmoid()
    else:
        wanted = logits.softmax(-1) + (0 if moe.router.selection_bias is None else moe.router.selection_bias)
        whole = wanted.topk(K).indices.clamp_max(E)
    parts = []
    for part in range(2):
        moe.router.rows = PartOfRows(part, whole)
        parts.append(moe(hidden[:, part::2], None))
        torch.testing.assert_close(parts[-1][0], truth[:, part::2], atol=TOLERANCE, rtol=0)
    assert torch.equal(sum(part[1].counts for part in parts), stats.counts)
    assert torch.equal(sum(part[1].dropped for part in parts), stats.dropped)
