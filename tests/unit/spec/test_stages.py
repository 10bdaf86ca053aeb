"""Stages cover the model once, in order, and the dearest is as cheap as any cut allows."""

import dataclasses
import itertools

import pytest

from moe_zoo.spec.accounting import block_flops_per_token, forward_flops_per_token, head_flops_per_token
from moe_zoo.spec.presets import load_preset
from moe_zoo.spec.stages import cut_stages

ARCH = dataclasses.replace(load_preset("switch-lm-tiny"), num_layers=7)


def test_blocks_and_head_add_up_to_the_model():
    blocks = sum(block_flops_per_token(ARCH, layer, 64) for layer in range(7))
    assert blocks + head_flops_per_token(ARCH) == forward_flops_per_token(ARCH, 64)


@pytest.mark.parametrize("num_stages", range(1, 8))
@pytest.mark.parametrize("vocab_size", [64, 20_000])
def test_no_cut_has_a_cheaper_dearest_stage(num_stages, vocab_size):
    arch = dataclasses.replace(ARCH, vocab_size=vocab_size)
    costs = [block_flops_per_token(arch, layer, 64) for layer in range(7)]
    costs[-1] += head_flops_per_token(arch)

    def dearest(starts):
        ends = [*starts[1:], 7]
        return max(sum(costs[a:b]) for a, b in zip(starts, ends, strict=True))

    best = min(dearest([0, *inner]) for inner in itertools.combinations(range(1, 7), num_stages - 1))
    cut = cut_stages(arch, num_stages, 64)
    assert [layer for stage in cut for layer in stage] == list(range(7)) and all(cut)
    assert dearest([stage.start for stage in cut]) == best


def test_a_large_head_leaves_its_stage_fewer_blocks():
    cut = cut_stages(dataclasses.replace(ARCH, vocab_size=20_000), 2, 64)
    assert len(cut[1]) < len(cut[0])
