"""The Switch encoder-decoder equals transformers' where that is right; where it is not, ours equals the paper."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSeq2SeqLM, SwitchTransformersConfig, SwitchTransformersForConditionalGeneration
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersAttention

import moe_zoo
from moe_zoo.models.families.switch_transformers import read, write
from moe_zoo.models.hub import from_architecture
from moe_zoo.models.init import initialize
from moe_zoo.models.source import Source
from moe_zoo.models.switch import SparseEncoderDecoder
from moe_zoo.ops import reference
from moe_zoo.ops.relative import relative_buckets
from moe_zoo.spec.accounting import num_parameters
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.errors import CheckpointError, MoeZooError, RecipeError
from tests.helpers import run_where_moe_zoo_is_not_installed

SMALL = {
    "vocab_size": 48,
    "d_model": 24,
    "d_kv": 6,
    "d_ff": 20,
    "num_heads": 3,
    "num_layers": 4,
    "num_decoder_layers": 4,
    "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 2,
    "num_experts": 4,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
}
CASES = [
    {},
    {"num_decoder_layers": 3, "num_sparse_decoder_layers": 1, "dense_act_fn": "gelu"},  # of three, the second
    {"num_sparse_encoder_layers": 4, "num_sparse_decoder_layers": 4, "tie_word_embeddings": False},
    {"num_sparse_encoder_layers": 0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
]
ARCH = {
    "vocab_size": 48,
    "d_model": 24,
    "num_layers": 5,
    "attention": {"num_heads": 3, "head_dim": 6},
    "feed_forward": {"d_ff": 20, "activation": "gelu", "gated": True},
    "moe": {
        "router": {"num_experts": 4, "jitter": 0.1},
        "experts": {"d_ff": 20, "activation": "gelu", "gated": True},
    },
    "encoder": {"num_layers": 2},
    "init_std": 0.3,
}


def theirs(**values) -> SwitchTransformersForConditionalGeneration:
    """transformers' model, every parameter random, both halves embedded alike as in every T5."""
    torch.manual_seed(3)
    model = SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**SMALL | values))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.normal_(std=0.3).add_(1.0 if "norm" in name else 0.0)
        for half in (model.encoder, model.decoder):
            half.embed_tokens.weight.copy_(model.shared.weight)
    return model.eval()


def tokens(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(2, 48, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sees_both_ways", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (64, 512)])
def test_every_distance_falls_in_the_bucket_of_transformers(sees_both_ways, buckets, max_distance):
    distances = torch.arange(-700, 701)
    expected = SwitchTransformersAttention._relative_position_bucket(distances, sees_both_ways, buckets, max_distance)
    found = relative_buckets(distances, buckets, max_distance, sees_both_ways=sees_both_ways)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("values", CASES)
def test_logits_loss_gradients_and_generation_are_those_of_transformers(values, tmp_path):
    reference = theirs(**values)
    reference.save_pretrained(tmp_path)
    ours = moe_zoo.load(tmp_path)
    ids, decoder_ids, labels = tokens(2, 40), tokens(2, 30, seed=6), tokens(2, 20, seed=7)
    labels[0, 15:] = -100
    weights = torch.randn(2, 30, 48, generator=torch.Generator().manual_seed(8))
    expected, found = (model(input_ids=ids, decoder_input_ids=decoder_ids).logits for model in (reference, ours))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    if not reference.config.tie_word_embeddings:  # three copies there
        reference.shared.weight.grad = (
            reference.encoder.embed_tokens.weight.grad + reference.decoder.embed_tokens.weight.grad
        )
    losses = [model(input_ids=ids, labels=labels).loss.item() for model in (reference, ours)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, 33:] = 0
    many = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = reference.generate(ids, **many)
    for how in ({}, {"use_cache": False}):
        assert torch.equal(ours.generate(ids, **many, **how), expected)
    assert torch.equal(ours.generate(ids, **many, num_beams=3), reference.generate(ids, **many, num_beams=3))
    compare_gradients(reference, ours, tmp_path / "gradients")


@pytest.mark.parametrize("values", CASES)
def test_what_is_saved_loads_there_bit_for_bit(values, tmp_path):
    reference = theirs(**values)
    reference.save_pretrained(tmp_path / "theirs")
    moe_zoo.load(tmp_path / "theirs").save_pretrained(tmp_path / "ours")
    again, info = SwitchTransformersForConditionalGeneration.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(info.values())
    expected = reference.state_dict()
    assert all(torch.equal(values, expected[name]) for name, values in again.state_dict().items())
    configs = [model.config.to_dict() | {"_name_or_path": ""} for model in (again, reference)]
    if values.get("num_sparse_encoder_layers") == 0:  # and yet it has one: we say so
        assert configs[0].pop("num_sparse_encoder_layers") == 1 and configs[1].pop("num_sparse_encoder_layers") == 0
    assert configs[0] == configs[1]
    assert moe_zoo.load(tmp_path / "ours").model.architecture == moe_zoo.load(tmp_path / "theirs").model.architecture


def test_our_own_layout_is_saved_with_its_code_and_loads_as_any_seq2seq_model(tmp_path):
    model = from_architecture(Architecture.from_dict(ARCH), decoder_start_token_id=0, pad_token_id=0).eval()
    initialize(model.model, seed=1)
    model.save_pretrained(tmp_path)
    ids = tokens(1, 9)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    logits = model(input_ids=ids, labels=ids).logits
    assert torch.equal(again(input_ids=ids, labels=ids).logits, logits)
    assert torch.equal(moe_zoo.load(tmp_path)(input_ids=ids, labels=ids).logits, logits)
    script = f"""
import torch
from transformers import AutoModelForSeq2SeqLM
model = AutoModelForSeq2SeqLM.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)
print(model.generate(torch.tensor({ids.tolist()}), max_new_tokens=4, do_sample=False))
"""
    run_where_moe_zoo_is_not_installed(script, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_embeddings": True}, {"norm": "layernorm"}, {"moe": None}, {"encoder": {"num_layers": 1, "every": 3}}],
)
def test_arithmetic_counts_the_parameters_of_the_module(changes):
    arch = Architecture.from_dict(ARCH | changes)
    assert sum(param.numel() for param in SparseEncoderDecoder(arch).parameters()) == num_parameters(arch)


def test_an_encoder_sees_all_of_its_text_and_a_decoder_no_later_token():
    model = initialize(SparseEncoderDecoder(Architecture.from_dict(ARCH)), seed=0).double().eval()
    ids, decoder_ids = tokens(1, 9), tokens(1, 7, seed=6)
    later, last = ids.clone(), decoder_ids.clone()
    later[0, 8], last[0, 6] = (later[0, 8] + 1) % 48, (last[0, 6] + 1) % 48
    before, other_text, other_end = (model(x).logits for x in ((ids, decoder_ids), (later, decoder_ids), (ids, last)))
    assert (before - other_text).abs().amax(-1).min() > 1e-6
    torch.testing.assert_close(before[:, :6], other_end[:, :6], atol=1e-12, rtol=0)


def test_stages_one_after_the_other_are_the_whole_model():
    arch = dataclasses.replace(Architecture.from_dict(ARCH), tie_embeddings=False)
    model = initialize(SparseEncoderDecoder(arch), seed=0).eval()
    x, stats, shares = (tokens(2, 8), tokens(2, 4)), [], []
    for blocks in (range(1), range(1, 3), range(3, 5)):
        stage = SparseEncoderDecoder(arch, blocks).eval()
        stage.load_state_dict({name: value for name, value in model.state_dict().items() if name in stage.state_dict()})
        out = stage(x)
        if blocks.stop < 5:
            assert tuple(part.shape for part in out.logits) == stage.wire_shapes(2, 8, 4)
        x = out.logits
        stats.append(out.stats.counts)
        shares.append(out.shares)
    whole = model((tokens(2, 8), tokens(2, 4)))
    assert torch.equal(x, whole.logits) and torch.equal(torch.cat(stats), whole.stats.counts)
    assert torch.cat(shares).tolist() == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3, 1 / 3])


@torch.no_grad()
def compare_gradients(reference, ours, folder: Path) -> None:
    """transformers writes its gradients as if they were weights: then both go by the names of its files."""
    for param in reference.parameters():
        param.copy_(param.grad if param.grad is not None else torch.zeros_like(param))
    reference.save_pretrained(folder)
    source = Source(folder)
    for name, param in ours.model.named_parameters():
        expected = source.values(name)
        limit = 1e-4 * expected.abs().max().item() + 1e-6
        torch.testing.assert_close(param.grad, expected, rtol=0, atol=limit, msg=lambda text, n=name: f"{n}: {text}")


# ---------------------------------------------------------------------- where transformers is wrong


def test_transformers_balances_nothing_when_every_layer_is_sparse():
    values = {"num_sparse_encoder_layers": 4, "num_sparse_decoder_layers": 4}
    model, ids = theirs(**values), tokens(2, 16)
    out = model(input_ids=ids, labels=ids, output_router_logits=True)
    assert out.encoder_aux_loss == out.encoder_z_loss == out.decoder_aux_loss == out.decoder_z_loss == 0
    arch = read(model.config)
    stats = initialize(SparseEncoderDecoder(arch), seed=0).train()((ids, ids)).stats
    assert len(stats.counts) == 8
    for counts, probs, z in zip(stats.counts, stats.prob_sums, stats.z_sums, strict=True):
        share, mean = counts.sum(0) / 32, probs.sum(0) / 32
        assert 4 * (share * mean).sum() > 0.9 and z.sum() > 0  # the paper's equation 4, its alpha left out


def test_transformers_multiplies_the_input_of_the_experts_by_the_jitter_too():
    model = theirs(router_jitter_noise=0.3).train()
    mlp, hidden = model.encoder.block[1].layer[1].mlp, torch.ones(1, 5, 24)
    mlp(hidden)
    assert not torch.equal(hidden, torch.ones(1, 5, 24))  # in place
    arch = dataclasses.replace(read(model.config))
    ours = initialize(SparseEncoderDecoder(arch), seed=0).train().layers["1"].feed_forward
    routing = ours.router(torch.ones(1, 5, 24), torch.tensor([1]))
    stacks, unit = (ours.experts.w_up, ours.experts.w_down, None, None), ours.experts.unit
    expected = reference.experts(torch.ones(5, 24), routing.experts_TK, routing.weights_TK, stacks, unit)
    found, _ = ours(torch.ones(1, 5, 24), torch.tensor([1]))
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize("length", [512, 64])
def test_a_constant_capacity_is_our_factor_at_512_tokens_alone(length, tmp_path):
    model = theirs(expert_capacity=120, router_jitter_noise=0.0)
    model.save_pretrained(tmp_path)
    ours, ids = moe_zoo.load(tmp_path), tokens(1, length)
    assert ours.model.architecture.moe.router.capacity_factor == 120 * 4 / 512
    model.train(), ours.train()
    _, routings, _ = zip(*_watch(model, lambda: model(input_ids=ids, decoder_input_ids=tokens(1, 3))), strict=True)
    theirs_dropped = [int(length - chosen.sum()) for chosen in routings[:2]]
    # The paper's equation 3: what an expert takes grows with the row.
    stats = ours.model((ids, tokens(1, 3))).stats
    ours_dropped = stats.dropped[:2].sum(1).int().tolist()
    first = F.relu(stats.counts[0, 0] - -(-length * 120 // 512)).sum()
    assert ours_dropped[0] == int(first) > 0
    assert (theirs_dropped == ours_dropped) == (length == 512)
    assert theirs_dropped == [0, 0] or length == 512
    ours.eval()
    assert ours.model((ids, tokens(1, 3))).stats.dropped.sum() == 0


def _watch(model, call) -> list[tuple]:
    seen = []
    routers = [module for name, module in model.named_modules() if name.endswith("router")]
    hooks = [router.register_forward_hook(lambda _, __, out: seen.append((0, out[0].float(), 0))) for router in routers]
    call()
    for hook in hooks:
        hook.remove()
    return seen


def test_transformers_forgets_tokens_of_long_rows_when_it_does_not_train(tmp_path):
    model, ids = theirs(expert_capacity=3), tokens(1, 40)
    model.save_pretrained(tmp_path)
    ours = moe_zoo.load(tmp_path)
    roomy = theirs(expert_capacity=40)
    found, theirs_found, wanted = (
        m(input_ids=ids, decoder_input_ids=tokens(1, 9)).logits for m in (ours, model, roomy)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert (theirs_found - wanted).abs().max() > 0.1


def test_transformers_has_no_gated_experts_and_our_layout_says_so_when_saved_in_theirs():
    with pytest.raises(KeyError, match="gated-gelu"):
        theirs(dense_act_fn="gated-gelu")
    with pytest.raises(
        CheckpointError, match=r"save_pretrained: feed_forward; the layout of switch_transformers has no "
    ):
        write(Architecture.from_dict(ARCH))
    ungated = {"d_ff": 20, "activation": "relu", "gated": False}
    odd = ARCH | {"feed_forward": ungated, "moe": {"router": {"num_experts": 4}, "experts": ungated, "every": 3}}
    with pytest.raises(CheckpointError, match=r"no words for such a choice of sparse layers"):
        write(Architecture.from_dict(odd | {"num_layers": 9, "encoder": {"num_layers": 4}}))


def test_transformers_cannot_generate_with_more_decoder_than_encoder_layers(tmp_path):
    model = theirs(num_layers=2, num_sparse_encoder_layers=1)
    model.save_pretrained(tmp_path)
    ours, ids = moe_zoo.load(tmp_path), tokens(1, 9)
    with pytest.raises(IndexError):
        model.generate(ids, max_new_tokens=3, do_sample=False)
    many = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    assert torch.equal(ours.generate(ids, **many), model.generate(ids, **many, use_cache=False))


def test_untied_embeddings_of_both_halves_are_one_here_and_two_there(tmp_path):
    model = theirs(tie_word_embeddings=False)
    assert model.encoder.embed_tokens.weight.data_ptr() != model.decoder.embed_tokens.weight.data_ptr()
    with torch.no_grad():
        model.decoder.embed_tokens.weight.add_(1.0)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"decoder.embed_tokens.weight; it is not equal to shared.weight, and"):
        moe_zoo.load(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"encoder": None}, r"model.attention: RelativeAttentionSpec; an encoder-decoder has relative positions"),
        ({"encoder": {"num_layers": 5}}, r"model.encoder.num_layers: 5; model.num_layers = 5 counts both halves"),
        (
            {"attention": {"num_heads": 3, "num_kv_heads": 3, "head_dim": 6}},
            r"model.attention: AttentionSpec; .* give it num_heads, head_dim, buckets, max_distance",
        ),
        ({"attention": {"num_heads": 3, "head_dim": 6, "buckets": 5}}, r"attention.buckets: 5; must be even"),
    ],
)
def test_what_no_encoder_decoder_can_be_is_refused(values, message):
    with pytest.raises(RecipeError, match=message):
        Architecture.from_dict(ARCH | values)


def test_labels_without_a_token_to_begin_with_are_refused_in_a_line():
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(MoeZooError, match=r"^config.decoder_start_token_id: null; a decoder begins with it; "):
        moe_zoo.load("switch-encdec-test")(ids, labels=ids)
