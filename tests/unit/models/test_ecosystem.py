"""What people do with a transformers model, done with ours: pipelines, LoRA, recomputed activations, companions."""

import copy
import json
import shutil

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, pipeline

import moe_zoo
from moe_zoo.models.hub import from_architecture
from moe_zoo.models.init import initialize
from moe_zoo.spec.architecture import Architecture
from tests.conftest import TOKENIZER
from tests.unit.models.test_families import QWEN, theirs

IDS = torch.tensor([[5, 9, 13, 21, 7, 6], [30, 31, 32, 33, 8, 4]])


@pytest.fixture(scope="module")
def model():
    values = moe_zoo.load_preset("topk-lm-test").to_dict() | {"vocab_size": 1024}
    made = from_architecture(Architecture.from_dict(values), bos_token_id=1, eos_token_id=2)
    initialize(made.model, seed=3)
    return made.eval()


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path)
    for file in TOKENIZER.glob("tokenizer*"):
        shutil.copy2(file, tmp_path)
    return tmp_path


def test_a_text_generation_pipeline(folder):
    generate = pipeline("text-generation", model=str(folder), device="cpu")
    (answer,) = generate("def main(", max_new_tokens=5, do_sample=False)
    again = pipeline("text-generation", model=moe_zoo.load(folder), tokenizer=str(folder), device="cpu")
    assert answer["generated_text"].startswith("def main(")
    assert answer == again("def main(", max_new_tokens=5, do_sample=False)[0]


def loss_and_gradients(model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    return {"": loss.detach()} | {name: param.grad for name, param in model.named_parameters()}


def test_recomputed_activations_change_nothing(model):
    model = copy.deepcopy(model).train()
    expected = loss_and_gradients(model)
    calls = []
    for block in model.model.layers.values():
        block.attention.register_forward_pre_hook(lambda *_: calls.append(1))
    model.activation_checkpointing_enable()
    assert model.is_activation_checkpointing
    found = loss_and_gradients(model)
    assert len(calls) == 2 * len(model.model.layers)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    model.activation_checkpointing_disable()
    loss_and_gradients(model)
    assert len(calls) == 3 * len(model.model.layers) and not model.is_activation_checkpointing


def test_recomputed_activations_of_an_encoder_decoder():
    model = moe_zoo.load("switch-encdec-test", seed=1).train()
    model.config.pad_token_id = 0
    expected = loss_and_gradients(model)
    model.activation_checkpointing_enable()
    found = loss_and_gradients(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_lora_trains_its_own_weights_alone_and_is_saved(model, folder, tmp_path):
    config = peft.LoraConfig(r=4, target_modules=["query", "value"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(copy.deepcopy(model), config).train()
    optimizer = torch.optim.AdamW([param for param in adapted.parameters() if param.requires_grad], lr=0.05)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = adapted(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    trained = [name for name, param in adapted.named_parameters() if param.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(moe_zoo.load(folder), tmp_path / "adapter").eval()
    torch.testing.assert_close(again(IDS).logits, adapted.eval()(IDS).logits)
    merged = again.merge_and_unload()
    torch.testing.assert_close(merged(IDS).logits, adapted(IDS).logits, rtol=1e-5, atol=1e-5)


def test_lora_on_the_stacked_experts(model):
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.w_up", "experts.w_down"])
    adapted = peft.get_peft_model(copy.deepcopy(model), config).train()
    adapted(IDS, labels=IDS).loss.backward()
    trained = {name: param.grad for name, param in adapted.named_parameters() if param.requires_grad}
    assert any(grad is not None and grad.abs().sum() > 0 for grad in trained.values())
    torch.testing.assert_close(adapted.eval()(IDS).logits, model(IDS).logits)  # an adapter begins as nothing


def test_tokenizer_and_generation_settings_travel_with_a_model(tmp_path):
    reference = theirs("qwen3_moe", QWEN)
    reference.generation_config.update(temperature=0.7, do_sample=True)
    reference.save_pretrained(tmp_path / "theirs")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "theirs" / name).write_text(json.dumps({"name": name}))
    moe_zoo.load(tmp_path / "theirs").save_pretrained(tmp_path / "ours")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert json.loads((tmp_path / "ours" / name).read_text()) == {"name": name}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.generation_config.temperature == 0.7


def test_the_tokenizer_of_a_model_of_ours_travels_too(folder, tmp_path):
    moe_zoo.load(folder).save_pretrained(tmp_path / "again")
    for file in TOKENIZER.glob("tokenizer*"):
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_half_the_bits_stay_half_the_bits(tmp_path):
    theirs("qwen3_moe", QWEN).bfloat16().save_pretrained(tmp_path / "theirs")
    model = moe_zoo.load(tmp_path / "theirs", dtype="auto")
    assert model.dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "bfloat16"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert again.dtype == torch.bfloat16
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype="auto").state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.state_dict().items())
