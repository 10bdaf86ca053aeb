"""What the paper tier says of an encoder-decoder: sparse layers, parameters, FLOPs, cuts, and what it refuses."""

from dataclasses import replace

import pytest

from moe_zoo.spec.accounting import (
    block_flops_per_token,
    forward_flops_per_token,
    head_flops_per_token,
    num_active_parameters,
    num_parameters,
    parameters,
)
from moe_zoo.spec.architecture import Architecture, EncoderSpec
from moe_zoo.spec.errors import PlanError, RecipeError
from moe_zoo.spec.layout import resolve_layout
from moe_zoo.spec.presets import load_preset
from moe_zoo.spec.stages import cut_stages
from tests.distributed.test_encoder_decoder_law import encdec_recipe

TEST = load_preset("switch-encdec-test")  # two layers of encoder, both sparse; three of decoder, the second sparse
FFN, ATTENTION, TABLES = 3 * 32 * 64, 4 * 32 * 32, 2 * 8 * 2


def test_each_half_counts_its_sparse_layers_by_itself():
    assert TEST.sparse_layers == [0, 1, 3]
    assert replace(TEST, encoder=EncoderSpec(num_layers=2)).sparse_layers == [1, 3]
    assert load_preset("switch-base-8").sparse_layers == list(range(1, 24, 2))
    assert load_preset("switch-c").sparse_layers == list(range(30))
    assert load_preset("st-moe-32b").sparse_layers == list(range(3, 48, 4))


def test_parameters_equal_the_sum_by_hand():
    sparse, dense = 4 * 32 + 4 * FFN, FFN
    encoder = 2 * (ATTENTION + sparse + 2 * 32) + 32
    decoder = 3 * (2 * ATTENTION + 3 * 32) + sparse + 2 * dense + 32
    assert num_parameters(TEST) == 64 * 32 + TABLES + encoder + decoder
    assert num_active_parameters(TEST) == num_parameters(TEST) - 3 * 3 * FFN
    extra = replace(TEST, encoder=replace(TEST.encoder, extra_ffn=True))
    assert num_parameters(extra) == num_parameters(TEST) + 3 * (FFN + 32)
    assert parameters(extra).feed_forward == 5 * FFN


def test_flops_of_a_row_are_those_of_both_halves():
    encoder_len, decoder_len = 12, 4
    own = lambda n: 4 * n * n * 32  # noqa: E731 - scores and values of n queries and n keys
    ffn = {True: 4 * 32 + FFN, False: FFN}
    encoder = 2 * (2 * encoder_len * (ATTENTION + ffn[True]) + own(encoder_len))
    cross = 2 * (ATTENTION // 2) * (decoder_len + encoder_len) + 4 * decoder_len * encoder_len * 32
    decoder = sum(2 * decoder_len * (ATTENTION + ffn[s]) + own(decoder_len) + cross for s in (False, True, False))
    head = 2 * 64 * 32 * decoder_len
    assert forward_flops_per_token(TEST, 16, 12) == (encoder + decoder + head) // 16
    blocks = [block_flops_per_token(TEST, layer, 16, 12) for layer in range(5)]
    assert sum(blocks) + head_flops_per_token(TEST, 16, 12) == forward_flops_per_token(TEST, 16, 12)


def test_stages_are_cut_through_both_halves():
    arch = load_preset("switch-base-8")
    cuts = cut_stages(arch, 4, 512, 256)
    assert [layer for stage in cuts for layer in stage] == list(range(24))
    longer = cut_stages(arch, 2, 512, 400)  # the encoder reads most of the row, and its stage has fewer blocks
    assert len(longer[0]) < len(cut_stages(arch, 2, 512, 100)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data__encoder_len": None},
            r"data.encoder_len: missing; the encoder reads so many of data.seq_len = 24 tokens",
        ),
        ({"data__encoder_len": 24}, r"data.encoder_len: 24; the encoder reads so many"),
        (
            {"model__encoder": None, "model__attention": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4}},
            r"data.encoder_len: 16; the model has no encoder to read them; drop it",
        ),
        (
            {"model__moe__router": {"num_experts": 6, "choice": "expert"}},
            r"router.choice: expert; an encoder-decoder takes the paper's choice alone",
        ),
    ],
)
def test_a_recipe_that_cannot_be_is_refused_in_one_line(changes, message):
    with pytest.raises(RecipeError, match=message) as caught:
        encdec_recipe("fsdp", **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"parallel__cp": 2, "data__encoder_len": 18}, r"parallel.cp: 2; 2 \* 2 = 4 must divide data.encoder_len = 18"),
        ({"parallel__tp": 4, "data__seq_len": 26}, r"parallel.tp: 4; must divide data.seq_len - encoder_len = 10"),
        (
            {"parallel__cp": 4, "parallel__context": "ulysses", "parallel__tp": 2},
            r"divide model.attention.num_heads = 4",
        ),
    ],
)
def test_a_half_that_ranks_cannot_share_is_refused_by_its_name(axes, message):
    with pytest.raises(PlanError, match=message):
        resolve_layout(encdec_recipe("fsdp", **axes), 8, 8)


def test_it_is_saved_as_plain_values_and_read_back():
    for name in ("switch-encdec-test", "st-moe-32b"):
        arch = load_preset(name)
        assert Architecture.from_dict(arch.to_dict()) == arch
