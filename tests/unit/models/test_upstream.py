"""What is wrong with a folder of weights is told in one line that names file and tensor."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import moe_zoo
from moe_zoo.spec.errors import CheckpointError
from tests.unit.models.test_families import QWEN, theirs

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
    rewrite(folder, lambda tensors: tensors.update({Q: torch.zeros(2, 3)}))
    assert refusal(folder) == (
        "weights of layers.1.attention.query.weight: shape (2, 3); config.json says (48, 24); one of the two is another "
        "model's"
    )


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
    with pytest.raises(CheckpointError, match=r"load: kimi-k2; its fresh fp32 weights are 3,823.7 GiB, "):
        moe_zoo.load("kimi-k2")
