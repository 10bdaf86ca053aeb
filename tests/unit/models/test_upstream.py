"""What is wrong with a folder of weights is told in one line that names file and tensor."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import moe_zoo
from moe_zoo.models.hub import from_architecture
from moe_zoo.models.init import initialize
from moe_zoo.models.saving import family_that_fits
from moe_zoo.models.upstream import with_decoder
from moe_zoo.spec.errors import CheckpointError
from tests.unit.models.test_families import DEEPSEEK, LATENT, LONGCAT, QWEN, theirs

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path):
    theirs("qwen3_moe", QWEN).save_pretrained(tmp_path, max_shard_size="40KB")
    return tmp_path


def shard_of(folder, name: str):
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]


def refusal(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        moe_zoo.load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rewrite(folder, change) -> None:
    path = shard_of(folder, Q)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_moe_zoo_load_takes_the_folder(folder):
    ids = torch.tensor([[3, 4, 5]])
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(moe_zoo.load(folder)(ids).logits, theirs(ids).logits)


def test_a_missing_shard(folder):
    path = shard_of(folder, Q)
    path.unlink()
    assert refusal(folder) == (
        f"{folder}: {path.name}; model.safetensors.index.json names it and it is not there; fetch it"
    )


def test_a_truncated_shard(folder):
    path = shard_of(folder, Q)
    path.write_bytes(path.read_bytes()[:-8])
    assert refusal(folder).startswith(f"{path}: ") and refusal(folder).endswith("; fetch the file again")


def test_a_missing_tensor(folder):
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    del values["weight_map"][Q]
    index.write_text(json.dumps(values))
    assert refusal(folder).startswith(f"{folder}: {Q}; no file of the folder has it; ")


def test_a_shape_that_contradicts_the_configuration(folder):
    path = shard_of(folder, Q)
    rewrite(folder, lambda tensors: tensors.update({Q: torch.zeros(2, 3)}))
    assert refusal(folder) == (
        f"{path}: {Q}: shape (2, 3) as layers.1.attention.query.weight; config.json says (48, 24); one of the two is another "
        f"model's"
    )


@pytest.mark.parametrize("part", ["up", "down"])
def test_an_expert_of_another_shape_than_its_peers(folder, part):
    name = f"model.layers.1.mlp.experts.3.{part}_proj.weight"
    path = shard_of(folder, name)
    tensors = load_file(path)
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, path)
    other = {"up": "model.layers.1.mlp.experts.3.gate_proj.weight", "down": name}[part]
    assert refusal(folder).startswith(f"{shard_of(folder, other)}: {other}: shape")
    assert refusal(folder).endswith("; fetch the file again")


def test_a_tensor_that_nobody_reads(folder):
    index = folder / "model.safetensors.index.json"
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.extra.weight": torch.zeros(1)}))
    values = json.loads(index.read_text())
    values["weight_map"]["model.layers.0.extra.weight"] = shard_of(folder, Q).name
    index.write_text(json.dumps(values))
    assert refusal(folder).startswith(f"{folder}: model.layers.0.extra.weight; qwen3_moe has no such weight; ")


def test_a_pickle_is_refused(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "a pickle can run any code" in refusal(folder)


def test_a_family_that_is_not_known_is_named_with_a_near_one(folder):
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen3_mo"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"model_type qwen3_mo, which moe-zoo does not build; did you mean 'qwen3_moe'\?"
    ):
        moe_zoo.load(folder)


def test_a_preset_that_this_machine_cannot_hold_is_refused():
    with pytest.raises(CheckpointError, match=r"load: kimi-k2; its weights at 4 bytes each are 3,823.7 GiB, "):
        moe_zoo.load("kimi-k2")


def test_a_config_of_the_wrong_kind(folder):
    values = json.loads((folder / "config.json").read_text()) | {"num_experts": "many"}
    (folder / "config.json").write_text(json.dumps(values))
    assert "config.json: " in refusal(folder) and refusal(folder).endswith("as a qwen3_moe; fetch it again")


def test_a_config_that_is_cut_short(folder):
    (folder / "config.json").write_text('{"model_type": "qwen3')
    assert "config.json: " in refusal(folder)


def test_an_architecture_that_nobody_knows(folder):
    values = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen3_mo"}
    (folder / "config.json").write_text(json.dumps(values))
    assert refusal(folder).endswith("moe-zoo does not build; did you mean 'qwen3_moe'?")


def test_kimi_k2_is_read_as_the_deepseek_v3_that_it_is(tmp_path):
    theirs("deepseek_v3", DEEPSEEK | LATENT).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    rope = values.pop("rope_parameters")
    values |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}  # as its config.json has them
    model = moe_zoo.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    again = moe_zoo.load(tmp_path)
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_model_in_fp8_is_the_model_that_its_numbers_stand_for(tmp_path):
    theirs("deepseek_v3", DEEPSEEK | LATENT).save_pretrained(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "fp8")
    tensors, stored, meant = load_file(tmp_path / "plain" / "model.safetensors"), {}, {}
    for name, values in tensors.items():
        if not name.endswith("proj.weight"):
            stored[name] = meant[name] = values
            continue
        blocks = [-(-size // 8) for size in values.shape]
        scales = torch.rand(*blocks) + 0.5
        wide = scales.repeat_interleave(8, 0)[: len(values)].repeat_interleave(8, 1)[:, : values.shape[1]]
        stored[name] = (values / wide).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        meant[name] = stored[name].float() * wide
    save_file(stored, tmp_path / "fp8" / "model.safetensors")
    save_file(meant, tmp_path / "plain" / "model.safetensors")
    values = json.loads((tmp_path / "fp8" / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(values))
    ids = torch.tensor([[3, 4, 5]])
    model = moe_zoo.load(tmp_path / "fp8")
    assert torch.equal(model(ids).logits, moe_zoo.load(tmp_path / "plain")(ids).logits)
    model.save_pretrained(tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())


def test_a_model_in_mxfp4_is_the_model_that_its_numbers_stand_for(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    theirs("gpt_oss", sizes).save_pretrained(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "mxfp4")
    stored = load_file(tmp_path / "plain" / "model.safetensors")
    meant = dict(stored)
    for name in [name for name in stored if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 127, blocks.shape[:-1], dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(stored, tmp_path / "mxfp4" / "model.safetensors")
    save_file(meant, tmp_path / "plain" / "model.safetensors")
    values = json.loads((tmp_path / "mxfp4" / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "mxfp4" / "config.json").write_text(json.dumps(values))
    ids = torch.tensor([[3, 4, 5]])
    found, expected = moe_zoo.load(tmp_path / "mxfp4"), moe_zoo.load(tmp_path / "plain")
    assert torch.equal(found(ids).logits, expected(ids).logits)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    torch.testing.assert_close(found(ids).logits, reference(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weight_map", [[1], None, {"x": 3}], ids=str)
def test_an_index_that_maps_no_names_to_files(folder, weight_map):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert refusal(folder).startswith(f"{index}: it is no JSON with a weight_map; ")


@pytest.mark.parametrize("text", ["[1]", "null"])
def test_a_config_that_holds_no_keys(folder, text):
    (folder / "config.json").write_text(text)
    assert refusal(folder).startswith(f"{folder / 'config.json'}: ")


def test_a_config_that_lacks_what_its_family_needs(tmp_path):
    theirs("deepseek_v2", DEEPSEEK | LATENT | {"topk_method": "group_limited_greedy"}).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | {"n_group": None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert refusal(tmp_path).endswith("it does not say what a deepseek_v2 is; fetch it again")


def test_generation_settings_that_are_no_json(folder):
    (folder / "generation_config.json").write_text("{")
    assert refusal(folder).startswith(f"{folder / 'generation_config.json'}: ")


@pytest.mark.parametrize(("more", "is_read"), [(0, False), (1, True)])
def test_layers_behind_the_last_are_left_out_only_where_the_config_has_them(folder, more, is_read):
    values = json.loads((folder / "config.json").read_text())
    values |= {"num_hidden_layers": 2, "num_nextn_predict_layers": more}
    (folder / "config.json").write_text(json.dumps(values))
    if is_read:
        assert len(moe_zoo.load(folder).model.layers) == 2
    else:
        assert "model.layers.2.input_layernorm.weight and 23 more; qwen3_moe has no such weight" in refusal(folder)


@pytest.mark.parametrize("name", ["model.mtp.layers.0.x.weight", "model.mtp_block.0.x.weight"])  # MiMo, ERNIE
def test_heads_that_predict_further_tokens_are_left_out(tmp_path, name):
    theirs("qwen3_moe", QWEN).save_pretrained(tmp_path)
    ids = torch.tensor([[3, 4, 5]])
    without = moe_zoo.load(tmp_path)(ids).logits
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {name: torch.zeros(1)}, tmp_path / "model.safetensors")
    assert torch.equal(moe_zoo.load(tmp_path)(ids).logits, without)
    save_file(tensors | {name.replace("mtp", "other"): torch.zeros(1)}, tmp_path / "model.safetensors")
    assert "qwen3_moe has no such weight" in refusal(tmp_path)


def test_a_head_that_config_ties_and_the_files_do_not(tmp_path):
    theirs("qwen3_moe", QWEN).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert refusal(tmp_path).startswith(f"{tmp_path}: lm_head.weight; it is not equal to model.embed_tokens.weight, ")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert moe_zoo.load(tmp_path).config.tie_word_embeddings


def test_what_was_trained_in_fp32_is_not_rounded_by_the_config_of_a_bf16_base(tmp_path):
    theirs("qwen3_moe", QWEN).bfloat16().save_pretrained(tmp_path / "base")
    for dtype in (torch.float32, torch.bfloat16):
        moe_zoo.load(tmp_path / "base", dtype=dtype).save_pretrained(tmp_path / "trained")
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "trained").dtype == dtype


def test_quantised_weights_beside_bf16_ones_come_as_bf16_too(tmp_path):
    theirs("deepseek_v3", DEEPSEEK | LATENT).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, values in list(tensors.items()):
        tensors[name] = values.to(torch.bfloat16)
        if name.endswith("proj.weight"):
            tensors[name] = values.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, tmp_path / "model.safetensors")
    values = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = moe_zoo.load(tmp_path, dtype="auto")
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert model(torch.tensor([[3, 4, 5]])).logits.dtype == torch.bfloat16


OURS = {
    "missing": (
        lambda tensors: tensors.pop("model.norm.weight"),
        r"model\.norm\.weight; no file of the folder has it; ",
    ),
    "unknown": (
        lambda tensors: tensors.update({"model.x": torch.zeros(1)}),
        r"model\.x; the model of config.json has no",
    ),
    "shape": (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(1)}), r"norm\.weight: shape \(1,\); "),
}


@pytest.mark.parametrize("damage", OURS)
def test_a_folder_of_ours_is_whole_or_refused(tmp_path, damage):
    moe_zoo.load("topk-lm-test").save_pretrained(tmp_path)
    change, told = OURS[damage]
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=told):
        moe_zoo.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert "the file is truncated or damaged" in refusal(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "give a folder that holds a model's weights" in refusal(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "moe_zoo"}')
    assert refusal(tmp_path).endswith("it does not say what a moe_zoo is; fetch it again")


def test_longcat_as_it_was_published_without_matrices_that_nobody_reads_and_with_another_head(tmp_path):
    theirs("longcat_flash", LONGCAT).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name: v for name, v in load_file(path).items() if not re.search(r"experts\.[5-7]\.", name)}
    ids = torch.tensor([[3, 4, 5]])
    whole = moe_zoo.load(tmp_path)(ids).logits
    save_file(tensors | {"model.mtp.norm.weight": torch.ones(3)}, path)
    assert torch.equal(moe_zoo.load(tmp_path)(ids).logits, whole)


@pytest.mark.parametrize(
    ("key", "value", "known"),
    [
        ("router_bias", True, "False"),
        ("zero_expert_type", "copy", "identity"),
        ("mla_scale_q_lora", False, "True"),
        ("head_dim", 8, "4"),
    ],
)
def test_a_longcat_that_transformers_would_build_otherwise(tmp_path, key, value, known):
    theirs("longcat_flash", LONGCAT).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    assert refusal(tmp_path) == (
        f"config.json of longcat_flash: {key}: {value}; moe-zoo builds this family with {known}; choose another model"
    )


@pytest.mark.parametrize("name", [name for name in moe_zoo.preset_names() if name.endswith("-tiny")] + ["topk-lm-test"])
def test_what_is_written_as_the_family_that_fits_computes_the_same_there(tmp_path, name):
    architecture = moe_zoo.load_preset(name)
    made = from_architecture(architecture, bos_token_id=1, eos_token_id=2)
    initialize(made.model, seed=0)
    with_decoder(made, made.model).save_pretrained(tmp_path)
    door = AutoModelForSeq2SeqLM if architecture.encoder else AutoModelForCausalLM
    theirs, told = door.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told.values()), told
    ids = {"input_ids": torch.arange(1, 24)[None]}
    ids |= {"decoder_input_ids": torch.arange(3, 9)[None]} if architecture.encoder else {}
    found, expected = (model.eval()(**ids).logits for model in (made, theirs))
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (1, 2)


def test_part_of_a_head_is_rotated_only_where_transformers_does_so(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    theirs("dots1", DEEPSEEK | {"rope_parameters": rope}).save_pretrained(tmp_path)
    assert "rope_parameters.partial_rotary_factor: 0.5; moe-zoo builds this family with 1.0" in refusal(tmp_path)


def test_a_single_file_is_read_before_an_index_as_transformers_does(folder):
    theirs("qwen3_moe", QWEN).save_pretrained(folder / "single")
    tensors = load_file(folder / "single" / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(moe_zoo.load(folder).model.norm.weight, tensors["model.norm.weight"])


def test_no_family_that_always_has_a_shared_expert_is_given_a_model_without_one():
    architecture = moe_zoo.load_preset("dots1-tiny")
    assert family_that_fits(architecture) == "dots1"
    assert family_that_fits(replace(architecture, moe=replace(architecture.moe, shared=None))) is None
