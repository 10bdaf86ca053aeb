"""Hugging Face style: save, load, Auto classes, remote code, generation with a cache."""

import copy
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

import moe_zoo
from moe_zoo.models.generation import generate_text
from moe_zoo.models.hub import from_architecture
from moe_zoo.models.init import initialize
from moe_zoo.models.remote_code import bundle
from moe_zoo.spec.errors import CheckpointError
from tests.helpers import run_where_moe_zoo_is_not_installed

IDS = torch.tensor([[5, 9, 13, 21, 7, 6], [30, 31, 32, 33, 8, 4]])


HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "bias": True, "out_bias": True, "sinks": True}
TWO_KINDS = {
    "attention": HEADS | {"rotary_dim": 0, "temperature": 0.5, "temperature_floor": 4, "value_dim": 6},
    "local_attention": HEADS | {"window": 5, "chunk": 7, "qk_unit_norm": True, "rope_interleaved": True},
    "local_layers": [0],
    "residual_scale": 0.5,
    "head_bias": True,
}
BIASED = {"bias": True, "limit": 0.5, "up_offset": 1.0, "activation": "quick_gelu", "gated": True, "d_ff": 16}


def two_kinds():
    """A model with all that attention and feed-forwards can have."""
    values = moe_zoo.load_preset("topk-lm-test").to_dict() | TWO_KINDS
    values["moe"] |= {"experts": BIASED, "shared": BIASED}
    values["moe"]["router"] |= {"bias": True}
    model = from_architecture(moe_zoo.Architecture.from_dict(values))
    generator = torch.Generator().manual_seed(4)
    for param in model.parameters():
        param.data.normal_(std=0.2, generator=generator)
    return model.eval()


@pytest.fixture(scope="module", params=["switch-lm-test", "topk-lm-test", "two kinds"])
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    model = two_kinds() if request.param == "two kinds" else moe_zoo.load(request.param, seed=1)
    for name, buffer in model.named_buffers():
        if name.endswith("selection_bias"):
            buffer.copy_(torch.linspace(-0.1, 0.1, len(buffer)))
    model.save_pretrained(folder)
    return model, folder


def test_a_saved_model_loads_bit_equal_by_every_door(saved):
    model, folder = saved
    expected = model(IDS).logits
    for loaded in (moe_zoo.load(folder), AutoModelForCausalLM.from_pretrained(folder)):
        assert type(loaded) is type(model)
        assert torch.equal(loaded.eval()(IDS).logits, expected)
    assert AutoConfig.from_pretrained(folder).to_architecture() == model.config.to_architecture()


def test_it_loads_where_moe_zoo_is_not_installed(saved, tmp_path):
    model, folder = saved
    torch.save(model(IDS).logits, tmp_path / "expected.pt")
    script = f"""
import torch
from transformers import AutoModelForCausalLM
model, notes = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True, output_loading_info=True)
assert not notes["missing_keys"] and not notes["unexpected_keys"], notes
logits = model.eval()(torch.tensor({IDS.tolist()})).logits
torch.testing.assert_close(logits, torch.load({str(tmp_path / "expected.pt")!r}))
model.save_pretrained({str(tmp_path / "again")!r})
"""
    run_where_moe_zoo_is_not_installed(script, tmp_path)
    name = "modeling_moe_zoo.py"
    assert (tmp_path / "again" / name).read_text() == (folder / name).read_text()


def test_generation_with_a_cache_equals_generation_without(saved):
    model = copy.deepcopy(saved[0]).double()  # no near-tie of two experts is decided by rounding
    with_cache, without = (
        model.generate(IDS, max_new_tokens=12, do_sample=False, use_cache=use) for use in (True, False)
    )
    assert torch.equal(with_cache, without)


def test_left_padding_changes_nothing(saved):
    model = copy.deepcopy(saved[0]).double()
    padding = torch.zeros(2, 3, dtype=torch.long)
    mask = torch.cat((padding, torch.ones_like(IDS)), 1)
    padded = model.generate(torch.cat((padding, IDS), 1), attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(padded[:, 3:], model.generate(IDS, max_new_tokens=8, do_sample=False))


def test_labels_give_the_mean_loss_of_the_next_token(saved):
    model, _ = saved
    out = model(IDS, labels=IDS)
    log_probs = out.logits[:, :-1].log_softmax(-1)
    truth = -log_probs.gather(-1, IDS[:, 1:, None]).mean()
    torch.testing.assert_close(out.loss, truth)


def test_the_export_names_no_package_of_ours():
    source = bundle()
    compile(source, "modeling_moe_zoo.py", "exec")
    assert "from moe_zoo" not in source and "import moe_zoo" not in source


def test_importing_moe_zoo_costs_no_torch():
    script = "import sys, moe_zoo; assert not {'torch', 'transformers', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("order", ["import moe_zoo, transformers", "import transformers, moe_zoo"])
def test_auto_classes_know_us_whatever_is_imported_first(order, saved):
    _, folder = saved
    script = f"{order}; print(type(transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})).__module__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "moe_zoo.models.causal_lm", done.stderr


def test_a_folder_without_a_model_is_one_clear_line(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"^load: .*; a model folder holds a config.json, this one does not; give"
    ):
        moe_zoo.load(tmp_path)


def test_a_folder_that_is_not_there_is_one_line_and_no_hub_is_asked(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        moe_zoo.load(tmp_path / "gone")
    assert str(caught.value) == f"load: {tmp_path}/gone; no such folder in {tmp_path}; check the path"


def test_text_from_a_preset_or_without_a_tokenizer_is_refused_in_one_line(saved):
    with pytest.raises(CheckpointError) as caught:
        generate_text("switch-lm-test", "a", num_tokens=1)
    assert str(caught.value) == (
        "generate: switch-lm-test; a preset has fresh weights and no tokenizer; give a trained model"
    )
    with pytest.raises(CheckpointError) as caught:
        generate_text(saved[1], "a", num_tokens=1)
    assert str(caught.value).startswith(f"tokenizer: {saved[1]}; none can be read from it (")
    assert "\n" not in str(caught.value)


def test_a_tied_model_is_saved_with_one_matrix_and_stays_tied(tmp_path):
    values = moe_zoo.load_preset("switch-lm-test").to_dict() | {"tie_embeddings": True}
    model = from_architecture(moe_zoo.Architecture.from_dict(values))
    initialize(model.model, seed=2)
    model.eval().save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {"model.embed.weight", "model.head.weight"} & set(file.keys()) == {"model.embed.weight"}
    again = moe_zoo.load(tmp_path)
    assert again.model.head.weight is again.model.embed.weight
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.fixture
def choosing_experts():
    values = moe_zoo.load_preset("switch-lm-test").to_dict()
    values["moe"]["router"] |= {"choice": "expert", "top_k": 2, "capacity_factor": None, "jitter": 0.0}
    model = from_architecture(moe_zoo.Architecture.from_dict(values))
    initialize(model.model, seed=2)
    return model.eval()


def test_a_model_whose_experts_choose_loads_where_moe_zoo_is_not_installed(choosing_experts, tmp_path):
    choosing_experts.save_pretrained(tmp_path)
    torch.save(choosing_experts(IDS).logits, tmp_path / "expected.pt")
    script = f"""
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, trust_remote_code=True).eval()
torch.testing.assert_close(model(torch.tensor({IDS.tolist()})).logits, torch.load({str(tmp_path / "expected.pt")!r}))
"""
    run_where_moe_zoo_is_not_installed(script, tmp_path)


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: model.generate(IDS, max_new_tokens=2, use_cache=False),
        lambda model: model(IDS, use_cache=True),
        lambda model: model(IDS, attention_mask=torch.ones_like(IDS).index_fill(1, torch.tensor([0]), 0)),
    ],
    ids=["generate", "cache", "padding"],
)
def test_a_model_whose_experts_choose_sees_whole_rows_or_refuses(choosing_experts, ask):
    with pytest.raises(moe_zoo.MoeZooError) as refused:
        ask(choosing_experts)
    assert str(refused.value) == (
        "router.choice: expert; who takes a token depends on its whole row, which can be neither continued nor padded; "
        "give whole rows without a cache, or train with router.choice token"
    )


def test_another_model_s_keys_are_an_error(saved, tmp_path):
    _, folder = saved
    shutil.copytree(folder, tmp_path / "copy")
    text = (tmp_path / "copy" / "config.json").read_text()
    (tmp_path / "copy" / "config.json").write_text(text.replace('"d_model"', '"d_modle"'))
    with pytest.raises(moe_zoo.MoeZooError, match=r"^model\.d_modle: unknown key; did you mean 'd_model'\?$"):
        moe_zoo.load(tmp_path / "copy")
