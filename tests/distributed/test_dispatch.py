"""Tokens that cross the network come back as if every expert had been at home: values and gradients, in float64."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moe_zoo.layers.dispatch import Dispatcher, LocalDispatcher, make_dispatcher
from moe_zoo.layers.experts import Experts
from moe_zoo.layers.moe import MoELayer
from moe_zoo.layers.router import TopKRouter
from moe_zoo.ops.experts import Unit
from moe_zoo.testing import run_distributed

BATCH, SEQ, WIDTH, HIDDEN, EXPERTS = 2, 7, 5, 6, 8  # rows per rank; odd sizes on purpose
TOLERANCE = 1e-12  # float64: sums of some dozens of products in another order

# (kind, ranks, slices): hierarchical on nodes of two ranks; slices: ranks that share an expert's hidden units
WAYS = [
    ("exact", 2, 1),
    ("exact", 4, 1),
    ("exact", 4, 2),
    ("padded", 2, 1),
    ("padded", 4, 1),
    ("padded", 4, 2),
    ("hierarchical", 4, 1),
    ("hierarchical", 4, 2),
]
# (top_k, capacity factor, idle): idle "expert": one expert gets no token; "rank": all experts of the last rank
CASES = [
    (1, None, None),
    (2, None, "expert"),
    (2, None, "rank"),
    (1, 0.5, None),
    (2, 0.5, "expert"),
    (2, 1.0, "rank"),
    (4, None, None),
    (4, 0.5, "rank"),
]


def layer(top_k: int, factor: float | None = None, num_idle: int = 0, choice: str = "token") -> MoELayer:
    """The whole layer, the same on every rank; the last ``num_idle`` experts get no token."""
    router = TopKRouter(
        WIDTH, EXPERTS, top_k, score="sigmoid", selection_bias=True, capacity_factor=factor, choice=choice
    )
    made = MoELayer(router, Experts(EXPERTS, WIDTH, HIDDEN, Unit("silu", gated=True))).double()
    generator = torch.Generator().manual_seed(11)
    for param in made.parameters():
        param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64)
    router.selection_bias[EXPERTS - num_idle :] = -10.0
    return made


def tokens(ranks: int) -> torch.Tensor:
    """(ranks * BATCH, SEQ, WIDTH): every rank's rows, one after the other."""
    generator = torch.Generator().manual_seed(12)
    return torch.randn(ranks * BATCH, SEQ, WIDTH, generator=generator, dtype=torch.float64)


def own_slice(name: str, stack: torch.Tensor, rank: int, ranks: int, slices: int) -> torch.Tensor:
    """What a rank holds of an expert stack: some experts, and of each some hidden units."""
    own = stack.chunk(ranks // slices)[rank // slices]
    if name == "w_down":
        return own.chunk(slices, dim=1)[rank % slices]
    return torch.cat([half.chunk(slices, dim=2)[rank % slices] for half in own.chunk(2, dim=2)], dim=2)  # gate, up


def spread(moe: MoELayer, kind: str, slices: int) -> MoELayer:
    """On a rank: keep its share of the experts and cross the network for the others."""
    for name, stack in list(moe.experts.named_parameters()):
        own = own_slice(name, stack.detach(), dist.get_rank(), dist.get_world_size(), slices)
        setattr(moe.experts, name, torch.nn.Parameter(own.clone()))
    moe.dispatcher = network(kind, slices)
    return moe


def network(kind: str, slices: int) -> Dispatcher:
    if kind != "hierarchical":
        return make_dispatcher(kind, EXPERTS, group=dist.group.WORLD, slices=slices)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "place"))
    groups = {"outer": mesh.get_group("node"), "inner": mesh.get_group("place")}
    return make_dispatcher(kind, EXPERTS, **groups, slices=slices)


def forward_backward(moe: MoELayer, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """Loss ``<cos(tokens), output>``; a router's gradient comes through the weights of its choice."""
    hidden = hidden.clone().requires_grad_()
    out, stats = moe(hidden, None)
    (out * hidden.detach().cos()).sum().backward()
    return {
        "output": out.detach(),
        "tokens": hidden.grad,
        "counts": stats.counts,
        "dropped": stats.dropped,
        "router": moe.router.weight.grad,
        "w_up": moe.experts.w_up.grad,
        "w_down": moe.experts.w_down.grad,
    }


def whole_layers(ranks: int, slices: int) -> list[MoELayer]:
    num_idle = {None: 0, "expert": 1, "rank": EXPERTS * slices // ranks}
    made = [layer(top_k, factor, num_idle[idle]) for top_k, factor, idle in CASES]
    return [*made, layer(2, choice="expert"), layer(3, 0.5, choice="expert")]


def across(kind: str, slices: int) -> list[dict[str, torch.Tensor]]:
    """On a rank: its own rows through the network, for each layer in turn."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = tokens(ranks).chunk(ranks)[rank]
    return [forward_backward(spread(moe, kind, slices), own) for moe in whole_layers(ranks, slices)]


@pytest.mark.parametrize(("kind", "ranks", "slices"), WAYS)
def test_the_network_changes_neither_outputs_nor_gradients(kind, ranks, slices):
    by_rank = run_distributed(across, kind, slices, world_size=ranks)
    for moe, found in zip(whole_layers(ranks, slices), zip(*by_rank, strict=True), strict=True):
        truth = forward_backward(moe, tokens(ranks))
        has_capacity = moe.router.capacity_factor is not None
        assert moe.router.choice == "expert" or (truth["dropped"].sum() > 0) == has_capacity
        idle = (moe.router.selection_bias < 0) & (moe.router.choice == "token")
        assert (truth["counts"].sum(0)[idle] == 0).all(), "these must get no token"
        for name in ("output", "tokens", "counts", "dropped"):
            assert_close(torch.cat([result[name] for result in found]), truth[name], name)
        assert_close(sum(result["router"] for result in found), truth["router"], "router")
        for name in ("w_up", "w_down"):
            for rank, result in enumerate(found):
                assert_close(result[name], own_slice(name, truth[name], rank, ranks, slices), f"{name} of rank {rank}")


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE, msg=lambda m: f"{what}: {m}")


# ---------------------------------------------------------------------- what two hops are for


def rows_that_leave_the_node(kind: str, top_k: int) -> int:
    """On a rank: how many rows of hidden width it sends to other nodes in a forward pass, there and back."""
    moe, count = spread(layer(top_k), kind, slices=1), 0
    send_all = dist.all_to_all_single

    def counted(received, rows, receive=None, send=None, group=None):
        nonlocal count
        if rows.is_floating_point() and rows.shape[1] == WIDTH:
            peers = [dist.get_global_rank(group, peer) for peer in range(group.size())]
            count += sum(n for n, peer in zip(send, peers, strict=True) if peer // 2 != dist.get_rank() // 2)
        return send_all(received, rows, receive, send, group=group)

    dist.all_to_all_single = counted
    try:
        moe(tokens(4).chunk(4)[dist.get_rank()], None)
    finally:
        dist.all_to_all_single = send_all
    return count


@pytest.mark.parametrize("top_k", [1, 4])
def test_a_token_crosses_to_a_node_once_however_many_of_its_experts_live_there(top_k):
    moe = layer(top_k)
    nodes = moe.router(tokens(4)).experts_TK // (EXPERTS // 2)
    homes = torch.arange(2).repeat_interleave(len(nodes) // 2)[:, None]
    slots_abroad = nodes != homes
    flat, two_hops = (
        sum(run_distributed(rows_that_leave_the_node, kind, top_k, world_size=4)) for kind in ("exact", "hierarchical")
    )
    assert flat == 2 * slots_abroad.sum()
    assert two_hops == 2 * slots_abroad.any(1).sum()
    assert two_hops == flat if top_k == 1 else two_hops < 0.55 * flat


# ---------------------------------------------------------------------- a rank without rows of its own


def one_rank_has_all_tokens(kind: str) -> list[torch.Tensor]:
    """Rank 0 sends everything, the others only compute."""
    rank = dist.get_rank()
    moe = spread(layer(2), kind, slices=1)
    hidden, routing = tokens(1), moe.router(tokens(1))
    if rank:
        hidden = hidden[:0]
        routing = routing._replace(weights_TK=routing.weights_TK[:0], experts_TK=routing.experts_TK[:0])
    out = moe.dispatcher(hidden.flatten(0, 1), routing, moe.experts)
    out.sum().backward()
    return [out.detach(), moe.experts.w_up.grad]


@pytest.mark.parametrize(("kind", "ranks"), [("exact", 2), ("hierarchical", 4)])
def test_a_rank_without_tokens_still_computes_for_the_others(kind, ranks):
    (out, first), *others = run_distributed(one_rank_has_all_tokens, kind, world_size=ranks)
    moe = layer(2)
    expected = LocalDispatcher()(tokens(1).flatten(0, 1), moe.router(tokens(1)), moe.experts)
    expected.sum().backward()
    assert all(empty.shape == (0, WIDTH) for empty, _ in others)
    assert_close(out, expected.detach(), "output")
    assert_close(torch.cat((first, *(grad for _, grad in others))), moe.experts.w_up.grad, "w_up")


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
