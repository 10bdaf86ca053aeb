"""Counts are checked against sums written out by hand; the module's own count is checked where the module is."""

from dataclasses import replace

import pytest

from moe_zoo.spec.accounting import (
    forward_flops_per_token,
    num_active_parameters,
    num_parameters,
    parameters,
    training_bytes,
    training_flops_per_token,
    weight_bytes,
)
from moe_zoo.spec.presets import load_preset, preset, preset_names

SWITCH = load_preset("switch-lm-test")
TOPK = load_preset("topk-lm-test")


def test_switch_parameters_equal_the_sum_by_hand():
    block = 4 * 32 * 32 + 2 * 32 + 4 * 32 + 4 * (2 * 32 * 64)  # attention, norms, router, experts
    assert num_parameters(SWITCH) == 64 * 32 + 2 * block + 32 + 64 * 32
    assert num_active_parameters(SWITCH) == num_parameters(SWITCH) - 2 * 3 * (2 * 32 * 64)


def test_topk_parameters_equal_the_sum_by_hand():
    attention = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 2 * 16  # q, k and v of one head, o, qk-norm
    expert = 3 * 32 * 32
    block = attention + 2 * 32 + 4 * 32 + 4 * expert + expert
    assert num_parameters(TOPK) == 64 * 32 + 2 * block + 32 + 64 * 32
    assert num_active_parameters(TOPK) == num_parameters(TOPK) - 2 * 2 * expert


def test_tying_layernorm_and_dense_layers_change_what_they_should():
    counts = parameters(replace(SWITCH, tie_embeddings=True, norm="layernorm", moe=replace(SWITCH.moe, first_layer=1)))
    assert counts.head == 0
    assert counts.norms == 5 * 2 * 32
    assert counts.feed_forward == 2 * 32 * 64
    assert counts.router == 4 * 32
    assert sum(counts) == counts.total


def test_a_shortcut_and_experts_without_weights_are_counted_once_each():
    router = replace(TOPK.moe.router, zero_experts=2)
    arch = replace(TOPK, shortcut=True, moe=replace(TOPK.moe, router=router))
    attention = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 2 * 16
    expert = 3 * 32 * 32
    dense = 3 * 32 * arch.feed_forward.d_ff
    block = 2 * (attention + 2 * 32 + dense) + (4 + 2) * 32 + 4 * expert + expert
    assert num_parameters(arch) == 64 * 32 + 2 * block + 32 + 64 * 32
    met = 2 * 4 * expert * 2 // 6  # of both layers' experts, two choices among six
    assert num_active_parameters(arch) == num_parameters(arch) - 2 * 4 * expert + met
    matrices = 2 * (2 * (attention - 32 + dense) + 6 * 32 + expert) + met + 64 * 32
    scores = 2 * 2 * (4 * 10 * 32)  # two layers, two attentions
    assert abs(forward_flops_per_token(arch, seq_len=10) - 2 * matrices - scores) <= 4  # the average is rounded


def test_a_dense_model_has_no_expert_and_is_wholly_active():
    dense = replace(SWITCH, moe=None)
    assert parameters(dense).experts == parameters(dense).router == parameters(dense).shared == 0
    assert num_active_parameters(dense) == num_parameters(dense)


def test_flops_are_two_per_matrix_element_plus_scores_over_the_whole_sequence():
    matrices = 2 * (4 * 32 * 32 + 4 * 32 + 2 * 32 * 64) + 64 * 32
    attention = 2 * (2 * 2 * 10 * 32)  # 2 layers, scores and values, 10 keys, 2 heads of 16
    assert forward_flops_per_token(SWITCH, seq_len=10) == 2 * matrices + attention
    assert training_flops_per_token(SWITCH, seq_len=10) == 3 * forward_flops_per_token(SWITCH, seq_len=10)
    tied = replace(SWITCH, tie_embeddings=True)
    assert forward_flops_per_token(tied, seq_len=10) == forward_flops_per_token(SWITCH, seq_len=10)


def test_bytes_follow_the_parameters():
    assert weight_bytes(SWITCH) == 2 * num_parameters(SWITCH)
    assert weight_bytes(SWITCH, bytes_per_parameter=4) == 4 * num_parameters(SWITCH)
    assert training_bytes(SWITCH) == 16 * num_parameters(SWITCH)


PUBLISHED = {name: preset(name).published for name in preset_names() if preset(name).published}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_size_is_counted_as_published(name):
    counted = [count(load_preset(name)) / 1e9 for count in (num_parameters, num_active_parameters)]
    for found, published in zip(counted, PUBLISHED[name], strict=True):
        if published is not None:
            digits = len(str(published).partition(".")[2])  # what is printed is rounded, or cut
            assert found == pytest.approx(published, abs=1.1 * 10**-digits)
