"""Tokens that cross the network come back as if every expert had been at home: values and gradients, in float64."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from moe_zoo.layers.dispatch import AllToAllDispatcher, LocalDispatcher
from moe_zoo.layers.experts import Experts
from moe_zoo.layers.router import TopKRouter
from moe_zoo.testing import run_distributed

BATCH, SEQ, WIDTH, HIDDEN = 2, 7, 5, 3  # rows per rank, and sizes that divide nothing
TOLERANCE = 1e-12  # float64: sums of some dozens of products in another order

# (top_k, capacity factor, idle): idle "expert": one expert gets no token; "rank": all experts of the last rank
CASES = [
    (1, None, None),
    (2, None, "expert"),
    (2, None, "rank"),
    (1, 0.5, None),
    (2, 0.5, "expert"),
    (2, 1.0, "rank"),
]


def layer(
    num_experts: int, top_k: int, factor: float | None, idle: str | None, ranks: int
) -> tuple[TopKRouter, Experts]:
    """A router and its experts, the same on every rank."""
    generator = torch.Generator().manual_seed(11)
    router = TopKRouter(
        WIDTH, num_experts, top_k, score="sigmoid", normalize=False, scale=1.0, jitter=0.0,
        capacity_factor=factor, eval_capacity_factor=factor, selection_bias=True, layer=0,
    )  # fmt: skip
    experts = Experts(num_experts, WIDTH, HIDDEN, activation="silu", gated=True)
    for module in (router.double(), experts.double()):
        for param in module.parameters():
            param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64)
    num_idle = {None: 0, "expert": 1, "rank": num_experts // ranks}[idle]
    router.selection_bias.zero_()
    router.selection_bias[num_experts - num_idle :] = -10.0
    return router, experts


def tokens(ranks: int) -> torch.Tensor:
    """(ranks * BATCH, SEQ, WIDTH): every rank's rows, one after the other."""
    generator = torch.Generator().manual_seed(12)
    return torch.randn(ranks * BATCH, SEQ, WIDTH, generator=generator, dtype=torch.float64)


def forward_backward(
    router, experts, dispatcher, hidden: torch.Tensor, weights: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Loss ``<weights, output>``; a router's gradient comes through the weights of its choice."""
    hidden = hidden.clone().requires_grad_()
    routing = router(hidden, None)
    out = dispatcher(hidden.flatten(0, 1), routing, experts).view_as(hidden)
    (out * weights).sum().backward()
    return {
        "output": out.detach(),
        "tokens": hidden.grad,
        "router": router.weight.grad,
        "w_up": experts.w_up.grad,
        "w_down": experts.w_down.grad,
        "chosen": routing.experts_TK,
    }


def across(cases: list[tuple]) -> list[dict[str, torch.Tensor]]:
    """On a rank: its own rows through the network, for each case in turn."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = []
    for top_k, factor, idle in cases:
        router, experts = layer(2 * ranks, top_k, factor, idle, ranks)
        for name, stack in list(experts.named_parameters()):
            setattr(experts, name, torch.nn.Parameter(stack.detach().chunk(ranks)[rank].clone()))
        hidden, weights = (rows.chunk(ranks)[rank] for rows in (tokens(ranks), tokens(ranks).cos()))
        dispatcher = AllToAllDispatcher(2 * ranks, dist.group.WORLD)
        results.append(forward_backward(router, experts, dispatcher, hidden, weights))
    return results


def assert_equal_to_local(case: tuple, found: list[dict[str, torch.Tensor]]) -> None:
    top_k, factor, idle = case
    ranks = len(found)
    router, experts = layer(2 * ranks, top_k, factor, idle, ranks)
    truth = forward_backward(router, experts, LocalDispatcher(), tokens(ranks), tokens(ranks).cos())
    chosen = torch.bincount(truth["chosen"].flatten(), minlength=2 * ranks + 1)
    assert (chosen[-1] > 0) == (factor is not None), "capacity must refuse someone, dropless nobody"
    num_idle = {None: 0, "expert": 1, "rank": 2}[idle]
    assert (chosen[2 * ranks - num_idle : -1] == 0).all(), "these must get no token"
    joined = {key: torch.cat([result[key] for result in found]) for key in truth if key != "router"}
    joined["router"] = sum(result["router"] for result in found)
    for key, expected in truth.items():
        torch.testing.assert_close(
            joined[key], expected, rtol=0, atol=TOLERANCE, msg=lambda m, k=key: f"{case} {k}: {m}"
        )


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_network_changes_neither_outputs_nor_gradients(ranks):
    by_rank = run_distributed(across, CASES, world_size=ranks)
    for case, found in zip(CASES, zip(*by_rank, strict=True), strict=True):
        assert_equal_to_local(case, list(found))


# ---------------------------------------------------------------------- a rank without rows of its own


def one_rank_has_all_tokens() -> list[torch.Tensor]:
    """Rank 0 sends everything, the others only compute."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    router, experts = layer(2 * ranks, 2, None, None, ranks)
    hidden = tokens(ranks)[: BATCH if rank == 0 else 0]
    routing = router(hidden, None) if rank == 0 else router(tokens(ranks)[:1], None)
    if rank:
        routing = routing._replace(weights_TK=routing.weights_TK[:0], experts_TK=routing.experts_TK[:0])
    mine = Experts(2, WIDTH, HIDDEN, activation="silu", gated=True).double()
    mine.w_up.data, mine.w_down.data = (p.detach().chunk(ranks)[rank] for p in (experts.w_up, experts.w_down))
    out = AllToAllDispatcher(2 * ranks, dist.group.WORLD)(hidden.flatten(0, 1), routing, mine)
    out.sum().backward()
    return [out.detach(), mine.w_up.grad]


def test_a_rank_without_tokens_still_computes_for_the_others():
    (out, first), (empty, second) = run_distributed(one_rank_has_all_tokens)
    router, experts = layer(4, 2, None, None, 2)
    hidden = tokens(2)[:BATCH]
    expected = LocalDispatcher()(hidden.flatten(0, 1), router(hidden, None), experts)
    expected.sum().backward()
    assert empty.shape == (0, WIDTH)
    torch.testing.assert_close(out, expected.detach(), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(torch.cat((first, second)), experts.w_up.grad, rtol=0, atol=TOLERANCE)


# ---------------------------------------------------------------------- the harness that all these laws rest on


def answer(question: str) -> str:
    rank = dist.get_rank()
    if question == "fail" and rank == 1:
        raise ValueError("rank 1 says no")
    if question == "fail":
        dist.barrier()  # waits for the rank that failed
    if question == "die" and rank == 1:
        os._exit(3)
    if question == "hang" and rank == 1:
        time.sleep(60)
    return f"{question} {rank} of {dist.get_world_size()}"


def test_an_exception_of_a_rank_reaches_the_caller_and_the_pool_works_again():
    with pytest.raises(AssertionError, match=r"^rank 1 of 2:\n(.|\n)*in answer\n(.|\n)*ValueError: rank 1 says no"):
        run_distributed(answer, "fail")
    assert run_distributed(answer, "hello") == ["hello 0 of 2", "hello 1 of 2"]


def test_a_rank_whose_process_dies_is_named():
    with pytest.raises(AssertionError, match=r"^rank 1 of 2:\nits process ended without a word$"):
        run_distributed(answer, "die")


def test_a_rank_that_hangs_is_named_after_a_short_time():
    run_distributed(answer, "hello")
    with pytest.raises(TimeoutError, match=r"^ranks \[1\] did not answer within 1 s$"):
        run_distributed(answer, "hang", timeout_s=1)
