"""What people do with a transformers model, done with ours: pipelines, LoRA, recomputed activations, companions."""

import copy
import json
import shutil

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, pipeline

import moe_zoo
from moe_zoo.models.generation import generate_text
from moe_zoo.models.hub import from_architecture
from moe_zoo.models.init import initialize
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.errors import MoeZooError
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


@pytest.mark.parametrize(
    "file", ["tokenizer.json", "spiece.model", "tiktoken.model"]
)  # the latter of Switch and Kimi K2
@pytest.mark.parametrize("kind", ["theirs", "ours"])
def test_every_kind_of_tokenizer_travels_with_every_kind_of_model(model, kind, file, tmp_path):
    made = model if kind == "ours" else theirs("qwen3_moe", QWEN)
    made.save_pretrained(tmp_path / "before")
    (tmp_path / "before" / file).write_text("text")
    moe_zoo.load(tmp_path / "before").save_pretrained(tmp_path / "after")
    assert (tmp_path / "after" / file).read_text() == "text"


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", ["theirs", "ours", "switch_transformers"])
def test_a_vocabulary_of_another_size_is_saved(kind, is_tied, tmp_path):
    if kind == "theirs":
        theirs("qwen3_moe", QWEN | {"tie_word_embeddings": is_tied}).save_pretrained(tmp_path / "before")
        made = moe_zoo.load(tmp_path / "before")
    else:
        values = moe_zoo.load_preset("topk-lm-test" if kind == "ours" else "switch-encdec-test").to_dict()
        made = from_architecture(Architecture.from_dict(values | {"tie_embeddings": is_tied}))
        initialize(made.model, seed=3)
    size = made.config.vocab_size + 3
    made.eval().resize_token_embeddings(size)
    made.save_pretrained(tmp_path / "after")
    again = moe_zoo.load(tmp_path / "after")
    ids = {"input_ids": torch.tensor([[1, 2, size - 1]])}
    ids |= {"decoder_input_ids": ids["input_ids"]} if kind == "switch_transformers" else {}
    assert again.config.vocab_size == again.model.architecture.vocab_size == size
    assert torch.equal(again(**ids).logits, made(**ids).logits) and again(**ids).logits.shape[-1] == size
    if kind == "theirs":
        torch.testing.assert_close(
            AutoModelForCausalLM.from_pretrained(tmp_path / "after")(**ids).logits, made(**ids).logits
        )


def test_the_losses_of_a_trainer_s_micro_batches_add_up(model):
    whole = model(IDS, labels=IDS).loss
    parts = [model(row[None], labels=row[None], num_items_in_batch=10).loss for row in IDS]
    torch.testing.assert_close(sum(parts), whole)


def test_what_a_trainer_gathered_is_what_is_saved(tmp_path):
    theirs("qwen3_moe", QWEN | {"tie_word_embeddings": True}).save_pretrained(tmp_path / "before")
    made = moe_zoo.load(tmp_path / "before")
    made.save_pretrained(tmp_path / "nothing", is_main_process=False)
    assert not (tmp_path / "nothing").exists()
    gathered = {name: values + 1 for name, values in made.state_dict().items()}
    made.save_pretrained(tmp_path / "after", state_dict=gathered)
    assert all(torch.equal(v, gathered[n]) for n, v in moe_zoo.load(tmp_path / "after").state_dict().items())


def test_a_model_of_ours_without_a_first_token_goes_on_from_a_prompt(model, tmp_path):
    made = from_architecture(model.model.architecture)
    initialize(made.model, seed=3)
    made.save_pretrained(tmp_path)
    for file in TOKENIZER.glob("tokenizer*"):
        shutil.copy2(file, tmp_path)
    assert isinstance(generate_text(tmp_path, "def main(", num_tokens=2, temperature=0), str)
    with pytest.raises(MoeZooError, match="it has no token that begins a text; give a prompt"):
        generate_text(tmp_path, "", num_tokens=2)
