"""The decoder is what its Architecture says, and packing does not change what a document sees."""

import dataclasses

import pytest
import torch

from moe_zoo.models.decoder import SparseDecoder
from moe_zoo.models.init import initialize
from moe_zoo.models.switch import make_network
from moe_zoo.ops.documents import unpack_rows
from moe_zoo.spec.accounting import num_parameters
from moe_zoo.spec.presets import load_preset, preset_names


@pytest.mark.parametrize("name", preset_names())
def test_arithmetic_counts_the_parameters_of_the_module(name):
    with torch.device("meta"):
        model = make_network(load_preset(name))
    assert sum(param.numel() for param in model.parameters()) == num_parameters(load_preset(name))


@pytest.mark.parametrize("changes", [{"tie_embeddings": True}, {"norm": "layernorm"}, {"moe": None}])
def test_arithmetic_follows_the_variants(changes):
    arch = dataclasses.replace(load_preset("topk-lm-test"), **changes)
    assert sum(param.numel() for param in SparseDecoder(arch).parameters()) == num_parameters(arch)


@pytest.mark.parametrize("name", ["switch-lm-test", "topk-lm-test"])
def test_a_document_is_computed_alike_alone_and_packed(name):
    model = initialize(SparseDecoder(load_preset(name)), seed=0).double().eval()
    first, second = torch.tensor([1, 9, 5, 6]), torch.tensor([1, 7, 8, 9, 10, 3])
    packed = unpack_rows(torch.cat((first, second))[None], bos_id=1)
    alone = unpack_rows(second[None], bos_id=1)
    logits = model(packed.input_ids, packed.positions, packed.mask).logits[0, 4:]
    torch.testing.assert_close(logits, model(alone.input_ids, alone.positions, alone.mask).logits[0])


def test_a_token_does_not_see_the_future():
    model = initialize(SparseDecoder(load_preset("topk-lm-test")), seed=0).double().eval()
    tokens = torch.randint(3, 60, (1, 9))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 60
    before, after = model(tokens).logits, model(changed).logits
    torch.testing.assert_close(before[:, :5], after[:, :5], atol=1e-12, rtol=0)
    assert (before[:, 5:] - after[:, 5:]).abs().max() > 1e-4


def test_initial_weights_are_a_function_of_seed_and_name():
    arch = load_preset("switch-lm-test")
    a, b, c = (initialize(SparseDecoder(arch), seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["embed.weight"], c["embed.weight"])
    stack = a["layers.0.feed_forward.experts.w_up"]
    assert not torch.equal(stack[0], stack[1])


def test_statistics_leave_as_values_and_jitter_needs_seeds():
    arch = load_preset("switch-lm-tiny")
    arch = dataclasses.replace(arch, d_model=32, num_layers=2, vocab_size=64)
    model = initialize(SparseDecoder(arch), seed=0).train()
    tokens = torch.randint(3, 60, (2, 16))
    plain, seeded = model(tokens), model(tokens, row_seeds=torch.tensor([1, 2]))
    sparse = len(arch.sparse_layers)
    assert plain.stats.counts.shape == (sparse, 2, arch.num_experts)
    assert plain.stats.counts.sum().item() == sparse * 2 * 16
    assert not torch.equal(plain.logits, seeded.logits)
    assert not any(torch.is_tensor(v) for m in model.modules() for k, v in vars(m).items() if not k.startswith("_"))
