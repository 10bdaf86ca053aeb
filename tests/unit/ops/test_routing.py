"""Choice, capacity and balance against their slow twins."""

import pytest
import torch

from moe_zoo.ops import reference
from moe_zoo.ops.balance import balance_loss, bias_step, pool_tokens
from moe_zoo.ops.routing import choose_experts, count_per_row, expert_capacity, within_capacity

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
    settings = {"top_k": 3, "score": score, "normalize": normalize, "scale": 2.5}
    choice = choose_experts(logits, bias_E=bias, **settings)
    for t, row in enumerate(logits):
        experts, weights = reference.choose(row, bias=bias, **settings)
        assert choice.experts_TK[t].tolist() == experts
        torch.testing.assert_close(choice.weights_TK[t], torch.stack(weights))
    torch.testing.assert_close(choice.probs_TE.sum(-1), torch.ones(11, dtype=torch.float64))
    grad = torch.autograd.grad(choice.weights_TK.square().sum(), logits)[0]
    assert grad.abs().sum() > 0


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
    ours = balance_loss(sums, pooled, pool_tokens=pool, total_tokens=rows * S, top_k=2, num_layers=layers)
    torch.testing.assert_close(ours, truth)
    for a, b in zip(torch.autograd.grad(ours, probs), torch.autograd.grad(truth, probs), strict=True):
        torch.testing.assert_close(a, b)


def test_collapse_of_every_layer_onto_another_expert_is_not_called_balanced():
    """transformers pools layers before the product and reports the ideal 1.0 here."""
    layers = E
    chosen = torch.arange(layers)[:, None, None].expand(layers, 8, 1)
    probs = torch.nn.functional.one_hot(chosen[..., 0], E).double()
    counts = torch.stack([count_per_row(c, 1, E) for c in chosen]).double()
    ours = balance_loss(probs.sum(1, keepdim=True), counts, pool_tokens=8, total_tokens=8, top_k=1, num_layers=layers)
    assert ours.item() == pytest.approx(E)


def test_the_bias_rises_where_the_load_is_low():
    assert torch.equal(bias_step(torch.tensor([[4, 0, 2]]), 0.5), torch.tensor([[-0.5, 0.5, 0.0]]))
