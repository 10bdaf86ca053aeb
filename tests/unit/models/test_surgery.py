"""Surgery keeps the function of a model where mathematics allows, and says where it does not."""

from dataclasses import replace

import pytest
import torch

from moe_zoo.certify.problem import leave_experts_idle
from moe_zoo.models.decoder import SparseDecoder
from moe_zoo.models.init import initialize
from moe_zoo.models.surgery import (
    grow_experts,
    largest_change,
    measure_usage,
    merge_experts,
    prune_experts,
    split_experts,
    upcycle,
)
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import AttentionSpec
from moe_zoo.spec.errors import MoeZooError
from moe_zoo.spec.feed_forward import FeedForwardSpec, MoESpec, RouterSpec

EXACT = 1e-5
ROUTERS = {
    "softmax": RouterSpec(num_experts=6, top_k=2),
    "normalised": RouterSpec(num_experts=6, top_k=2, normalize=True),
    "switch": RouterSpec(num_experts=4, capacity_factor=2.0),
    "sigmoid": RouterSpec(num_experts=6, top_k=2, score="sigmoid"),
    "deepseek": RouterSpec(num_experts=8, top_k=3, score="sigmoid", normalize=True, scale=2.5, selection_bias=True),
    "groups": RouterSpec(num_experts=8, top_k=2, num_groups=4, groups_per_token=2),
    "ernie": RouterSpec(num_experts=6, top_k=2, normalize=True, selection_bias=True),
    "biased": RouterSpec(num_experts=6, top_k=2, bias=True, selection_bias=True),
}

SCALED = RouterSpec(num_experts=6, score="sigmoid", scales_input=True)  # Llama 4


def model_of(router: RouterSpec | None, gated: bool = True, tied: bool = False, bias: bool = True) -> SparseDecoder:
    ffn = FeedForwardSpec(d_ff=12, activation="silu" if gated else "relu", gated=gated, bias=bias)
    arch = Architecture(
        vocab_size=40,
        d_model=16,
        num_layers=3,
        attention=AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8),
        feed_forward=ffn,
        moe=MoESpec(router=router, experts=ffn, first_layer=1) if router else None,
        tie_embeddings=tied,
        init_std=0.3,
    )
    model = initialize(SparseDecoder(arch).double(), seed=2).eval()
    for buffer in model.buffers():
        buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    return model


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("experts", "top_k", "granularity"), [(4, 1, 1), (8, 2, 1), (8, 4, 2), (12, 12, 4)], ids=str)
def test_an_upcycled_model_is_the_dense_one(experts, top_k, granularity, gated):
    dense = model_of(None, gated, tied=True)
    sparse = upcycle(dense, experts, top_k, granularity=granularity, seed=0)
    assert sparse.architecture.sparse_layers == [0, 1, 2]
    assert sparse.layers["0"].feed_forward.experts.w_down.shape == (experts, 12 // granularity, 16)
    assert largest_change(dense, sparse) < EXACT
    assert sparse.head.weight is sparse.embed.weight


def test_some_layers_may_stay_dense():
    dense = model_of(None)
    sparse = upcycle(dense, 4, 2, every=2, first=1, seed=0)
    assert sparse.architecture.sparse_layers == [1]
    assert largest_change(dense, sparse) < EXACT


def test_an_upcycled_model_learns_to_tell_its_copies_apart():
    sparse = upcycle(model_of(None), 4, 2, granularity=1, seed=0).train()
    ids = torch.randint(40, (4, 16), generator=torch.Generator().manual_seed(1))
    sparse(ids).logits.square().mean().backward()
    grads = sparse.layers["1"].feed_forward.experts.w_up.grad
    assert not torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("parts", [2, 3])
def test_split_experts_are_the_whole_ones(router, parts):
    model = model_of(ROUTERS[router])
    split = split_experts(model, parts)
    assert split.architecture.moe.router.top_k == parts * ROUTERS[router].top_k
    assert largest_change(model, split) < EXACT


@pytest.mark.parametrize("router", ROUTERS)
def test_all_copies_of_an_expert_are_the_expert(router):
    model = model_of(ROUTERS[router])
    grown = grow_experts(model, 2)
    assert grown.architecture.num_experts == 2 * ROUTERS[router].num_experts
    assert largest_change(model, grown) < EXACT


def test_one_copy_is_the_expert_where_weights_do_not_share_a_sum():
    model = model_of(replace(ROUTERS["sigmoid"], top_k=1))
    assert largest_change(model, grow_experts(model, 3, top_k=1)) < EXACT
    scaled = model_of(SCALED)
    assert largest_change(scaled, grow_experts(scaled, 3, top_k=1)) < EXACT
    shared = model_of(replace(ROUTERS["softmax"], top_k=1))
    assert largest_change(shared, grow_experts(shared, 3, top_k=1)) > 100 * EXACT


@pytest.mark.parametrize("router", ["normalised", "deepseek", "sigmoid"])
def test_pruning_what_nobody_chose_changes_nothing(router):
    model = model_of(ROUTERS[router])
    for buffer in model.buffers():
        buffer.zero_()
    leave_experts_idle(model, 2)
    usage = measure_usage(model, torch.randint(40, (2, 32), generator=torch.Generator().manual_seed(1)))
    assert usage[:, -2:].eq(0).all() and usage[:, :4].gt(0).all()
    keep = [list(range(usage.shape[1] - 2))] * 2
    pruned = prune_experts(model, keep)
    assert pruned.architecture.num_experts == ROUTERS[router].num_experts - 2
    assert largest_change(model, pruned) < EXACT


def test_merging_copies_gives_the_expert_back():
    model = model_of(ROUTERS["normalised"])
    grown = grow_experts(model, 2)
    usage = torch.rand(2, 12, generator=torch.Generator().manual_seed(3))
    assert largest_change(model, merge_experts(grown, 2, usage, top_k=2)) < EXACT


def test_a_merged_expert_is_the_mean_by_usage_of_what_is_alike():
    model = model_of(RouterSpec(num_experts=4, top_k=1))
    router, experts = model.layers["1"].feed_forward.router, model.layers["1"].feed_forward.experts
    with torch.no_grad():
        router.weight[2] = 2 * router.weight[0]
    usage = torch.tensor([[9.0, 5.0, 3.0, 5.0]] * 2)
    merged = merge_experts(model, 2, usage).layers["1"].feed_forward
    torch.testing.assert_close(
        merged.experts.w_up[0], (9 * experts.w_up[0] + 3 * experts.w_up[2]) / 12, rtol=1e-5, atol=1e-5
    )


def test_what_cannot_be_done_is_said_in_a_line():
    with pytest.raises(MoeZooError, match=r"^upcycle: --top-k: 3; a multiple of granularity = 2 .*; try 4$"):
        upcycle(model_of(None), 8, 3, granularity=2, seed=0)
    with pytest.raises(MoeZooError, match=r"^upcycle: the model is sparse already; "):
        upcycle(model_of(ROUTERS["softmax"]), 8, 2, seed=0)
    with pytest.raises(MoeZooError, match=r"^split-experts: parts 5; must divide the experts' width 12; "):
        split_experts(model_of(ROUTERS["softmax"]), 5)
    with pytest.raises(MoeZooError, match=r"^experts: the model is dense; "):
        split_experts(model_of(None), 2)
    with pytest.raises(
        MoeZooError, match=r"^experts: the model has blocks with a shortcut, or experts without weights; "
    ):
        split_experts(model_of(replace(ROUTERS["softmax"], zero_experts=1)), 2)
    top2 = replace(ROUTERS["groups"], group_score="top2")
    with pytest.raises(MoeZooError, match=r"^grow-experts: router.group_score top2; "):
        grow_experts(model_of(top2), 2)
    for operate in (split_experts, grow_experts):
        with pytest.raises(MoeZooError, match=r"-experts: router.score sparsemixer; "):
            operate(model_of(RouterSpec(num_experts=6, top_k=2, score="sparsemixer", tolerance=0.4)), 2)
        with pytest.raises(MoeZooError, match=r"-experts: router.scales_input true; "):
            operate(model_of(SCALED), 2)
    with pytest.raises(MoeZooError, match=r"^experts: the model is dense; "):
        measure_usage(model_of(None), torch.tensor([[1]]))
    for keep in ([0, 99], [0, 0]):
        with pytest.raises(MoeZooError, match=r"^prune-experts: 2 lists of \[1, 2\] experts"):
            prune_experts(model_of(ROUTERS["softmax"]), [keep, keep])
    with pytest.raises(MoeZooError, match=r"^prune-experts: 1 lists "):
        prune_experts(model_of(ROUTERS["softmax"]), [[0, 1]])
