"""Recompute runs the chosen blocks twice, and gradients keep every bit."""

import torch

from moe_zoo.models.decoder import SparseDecoder
from moe_zoo.models.init import initialize
from moe_zoo.parallel.build import RankStages
from moe_zoo.parallel.recompute import recompute_blocks
from moe_zoo.spec.presets import load_preset


def passes_and_gradients(every: int) -> tuple[list[int], dict[str, torch.Tensor]]:
    model = initialize(SparseDecoder(load_preset("switch-lm-nano")), seed=0).train()
    passes = [0] * 4
    for layer, block in model.layers.items():
        block.attention.register_forward_hook(lambda *_, i=int(layer): passes.__setitem__(i, passes[i] + 1))
    recompute_blocks(RankStages({0: model}), every)
    output = model(torch.arange(24).view(2, 12), row_seeds=torch.tensor([1, 2]))  # jitter must be drawn alike
    (output.logits.square().mean() + output.stats.prob_sums.square().sum()).backward()
    return passes, {name: param.grad for name, param in model.named_parameters()}


def test_the_chosen_blocks_run_twice_and_nothing_else_changes():
    once, truth = passes_and_gradients(every=0)
    assert once == [1, 1, 1, 1]
    for every, expected in ((1, [2, 2, 2, 2]), (2, [2, 1, 2, 1])):
        passes, grads = passes_and_gradients(every)
        assert passes == expected
        assert all(torch.equal(grads[name], truth[name]) for name in truth)
