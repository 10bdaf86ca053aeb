"""Choice, capacity and balance against their slow twins."""

import pytest
import torch

from moe_zoo.ops import reference
from moe_zoo.ops.balance import balance_loss, bias_step, pool_tokens
from moe_zoo.ops.routing import (
    GroupLimit,
    choose_experts,
    count_per_row,
    expert_capacity,
    score_experts,
    sparse_mixer,
    take_tokens,
    taken_slots,
    within_capacity,
)

B, S, E = 3, 7, 5


def chosen_TK(top_k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    skewed = torch.rand(B * S, E, generator=generator) + torch.linspace(1, 0, E)
    return skewed.topk(top_k).indices


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_choice_equals_the_reference(score, normalize, with_bias):
    torch.manual_seed(2)
    logits = torch.randn(11, E, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(E, dtype=torch.float64) if with_bias else None
    assert_choice_equals_the_reference(logits, bias, (1, 1, "max"), top_k=3, score=score, normalize=normalize)


@pytest.mark.parametrize("tolerance", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("shift", [0.0, -9.0, 3.0])  # all logits below zero, or all above
def test_sparse_mixer_equals_the_reference(tolerance, shift):
    torch.manual_seed(3)
    logits = (torch.randn(23, E, dtype=torch.float64) + shift).requires_grad_()
    weights, chosen = sparse_mixer(logits, top_k=2, tolerance=tolerance)
    rows = [reference.mix(row, 2, tolerance) for row in logits]
    assert chosen.tolist() == [row[0] for row in rows]
    expected = torch.stack([torch.stack(row[1]) for row in rows])
    torch.testing.assert_close(weights, expected, atol=1e-12, rtol=0)
    seed = torch.randn(23, 2, dtype=torch.float64)
    found, truth = (torch.autograd.grad(out, logits, seed)[0] for out in (weights, expected))
    torch.testing.assert_close(found, truth, atol=1e-12, rtol=0)


@pytest.mark.parametrize("group_score", ["max", "top2"])
@pytest.mark.parametrize("groups_per_token", [1, 2])
@pytest.mark.parametrize("offset", [0.0, -5.0])
def test_choice_within_groups_equals_the_reference_even_where_all_wanted_scores_are_negative(
    group_score, groups_per_token, offset
):
    torch.manual_seed(4)
    logits = torch.randn(23, 12, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(12, dtype=torch.float64) + offset
    groups = (4, groups_per_token, group_score)
    chosen = assert_choice_equals_the_reference(logits, bias, groups, top_k=3, score="sigmoid", normalize=True)
    assert all(len(set(row)) <= groups_per_token for row in (chosen // 3).tolist())
    unlimited = choose_experts(logits.sigmoid(), top_k=3, normalize=True, scale=1.0, bias_E=bias)[1]
    assert not torch.equal(chosen, unlimited), "the limit must bind"


def assert_choice_equals_the_reference(logits, bias, groups, *, score: str, **settings) -> torch.Tensor:
    scores = score_experts(logits, score)
    limit = GroupLimit(*groups) if groups[0] > 1 else None
    weights, chosen = choose_experts(scores.scores_TE, bias_E=bias, scale=2.5, limit=limit, **settings)
    truth = [reference.choose(row, score=score, bias=bias, groups=groups, scale=2.5, **settings) for row in logits]
    assert chosen.tolist() == [experts for experts, _ in truth]
    true_weights = torch.stack([torch.stack(row) for _, row in truth])
    torch.testing.assert_close(weights, true_weights)
    seed = torch.rand_like(weights)
    ours, theirs = (torch.autograd.grad(w, logits, seed)[0] for w in (weights, true_weights))
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    assert ours.abs().sum() > 0
    torch.testing.assert_close(scores.probs_TE.sum(-1), torch.ones(len(logits), dtype=torch.float64))
    return chosen


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0, 9.0])
def test_experts_take_the_tokens_that_the_reference_takes(factor):
    scores = torch.randn(B, S, E, generator=torch.Generator().manual_seed(5))
    scores[0, 2:5, 0] = 3.0  # equal: the earlier tokens go first
    capacity = expert_capacity(factor, S, 2, E)
    assert torch.equal(take_tokens(scores, capacity), reference.take(scores, 2, factor))


@pytest.mark.parametrize("normalize", [True, False])
def test_slots_of_a_mask_hold_its_entries_and_empty_places(normalize):
    torch.manual_seed(6)
    scores, taken = torch.rand(B, S, E, dtype=torch.float64), torch.rand(B, S, E) < 0.4
    capacity = int(taken.sum(1).max())
    slots = taken_slots(scores, taken, capacity, normalize=normalize, scale=2.0)
    assert len(slots.tokens_N) == B * capacity * E
    filled = slots.experts_N < E
    found = torch.zeros(B * S, E, dtype=torch.float64)
    found[slots.tokens_N[filled], slots.experts_N[filled]] = slots.weights_N[filled]
    weights = scores * taken
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    assert filled.sum() == taken.sum()
    torch.testing.assert_close(found, 2.0 * weights.flatten(0, 1), atol=1e-15, rtol=0)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
def test_capacity_drops_who_the_reference_drops(top_k, factor):
    chosen = chosen_TK(top_k)
    capacity = expert_capacity(factor, S, top_k, E)
    kept = within_capacity(chosen.view(B, S, top_k), E, capacity).flatten(0, 1)
    truth = torch.tensor(reference.drop(chosen.view(B, S, top_k).tolist(), E, factor)).flatten(0, 1)
    assert torch.equal(chosen.where(kept, E), truth)
    assert not kept.all(), "the case must drop something"


def test_counts_per_row_add_up():
    chosen = chosen_TK(2)
    counts = count_per_row(chosen, B, E)
    assert torch.equal(counts.sum(0), torch.bincount(chosen.flatten(), minlength=E))
    assert counts.sum(1).tolist() == [S * 2] * B


@pytest.mark.parametrize("scope", ["sequence", "micro_batch", "global_batch"])
def test_balance_in_each_scope_equals_the_textbook(scope):
    layers, rows, micro = 2, 6, 2
    torch.manual_seed(3)
    probs = torch.randn(layers, rows * S, E, dtype=torch.float64).softmax(-1).requires_grad_()
    chosen = probs.detach().topk(2).indices
    pools = {"sequence": rows, "micro_batch": micro, "global_batch": 1}[scope]
    truth = reference.balance_loss(probs, chosen, pools)

    counts = torch.stack([count_per_row(c, rows, E) for c in chosen]).double()
    pooled = counts.unflatten(1, (pools, -1)).sum(2, keepdim=True).expand(-1, -1, rows // pools, -1).flatten(1, 2)
    sums = probs.unflatten(1, (rows, S)).sum(2)
    pool = pool_tokens(scope, S, rows, micro)
    ours = balance_loss(sums, pooled, pool_tokens=pool, total_tokens=rows * S, slots_per_token=2, num_layers=layers)
    torch.testing.assert_close(ours, truth)
    for a, b in zip(torch.autograd.grad(ours, probs), torch.autograd.grad(truth, probs), strict=True):
        torch.testing.assert_close(a, b)


def test_collapse_of_every_layer_onto_another_expert_is_not_called_balanced():
    """transformers pools layers before the product and reports the ideal 1.0 here."""
    layers = E
    chosen = torch.arange(layers)[:, None, None].expand(layers, 8, 1)
    probs = torch.nn.functional.one_hot(chosen[..., 0], E).double()
    counts = torch.stack([count_per_row(c, 1, E) for c in chosen]).double()
    ours = balance_loss(
        probs.sum(1, keepdim=True), counts, pool_tokens=8, total_tokens=8, slots_per_token=1, num_layers=layers
    )
    assert ours.item() == pytest.approx(E)


def test_the_bias_rises_where_the_load_is_low():
    assert torch.equal(bias_step(torch.tensor([[4, 0, 2]]), 0.5), torch.tensor([[-0.5, 0.5, 0.0]]))
