"""The verbs about models, as a person and as a program would use them."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

import moe_zoo
from moe_zoo.spec.presets import preset_names
from moe_zoo.spec.recipe_file import load_recipe
from tests.conftest import TOKENIZER
from tests.unit.models.test_families import LLAMA3, QWEN, SMALL, theirs
from tests.unit.test_cli import run

ROOM = SMALL | {"vocab_size": 1024, "intermediate_size": 24}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A dense Qwen3 and a sparse one, with a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    for name, model_type, values in (("dense", "qwen3", {}), ("sparse", "qwen3_moe", QWEN | {"num_experts": 6})):
        theirs(model_type, ROOM | values).save_pretrained(root / name)
        for file in TOKENIZER.glob("tokenizer*"):
            shutil.copy2(file, root / name)
    return root


def test_presets_are_listed_for_people_and_for_programs(capsys):
    _, table, _ = run(capsys, "list")
    _, listed, _ = run(capsys, "list", "--json")
    rows = json.loads(listed)
    assert [row["name"] for row in rows] == preset_names()
    assert all(f" {name} " in table for name in preset_names())
    assert all(row["active"] <= row["total"] for row in rows)


def test_info_of_a_preset_and_of_a_folder(capsys, folders):
    _, text, _ = run(capsys, "info", "kimi-k2")
    assert "1,026.4 B" in text and "top 8 of 384 by sigmoid" in text
    _, told, _ = run(capsys, "info", str(folders / "sparse"), "--json")
    assert json.loads(told)["experts"] == 6
    model = moe_zoo.load(folders / "sparse")
    assert json.loads(told)["total"] == sum(param.numel() for param in model.parameters())


def test_the_model_section_that_info_prints_is_one_of_a_recipe(capsys, folders, tmp_path):
    _, section, _ = run(capsys, "info", str(folders / "sparse"), "--model")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        section + "name: r\ntrain: {steps: 2, global_batch: 2}\noptim: {lr: 1e-3}\n"
        f"data: {{path: x, tokenizer: y, seq_len: 8}}\ninit: {folders / 'sparse'}\n"
    )
    assert load_recipe(recipe, ()).model == moe_zoo.load(folders / "sparse").model.architecture


def test_a_card_is_printed_and_an_unknown_name_gets_a_suggestion(capsys):
    assert run(capsys, "card", "mixtral-8x7b")[1].startswith("---\nbase_model: mistralai/Mixtral-8x7B-v0.1\n")
    assert json.loads(run(capsys, "card", "mixtral-8x7b", "--json")[1])["metadata"]["license"] == "apache-2.0"
    for verb in ("info", "card"):
        code, _, err = run(capsys, verb, "mixtral-8x7")
        assert code == 2 and err.count("\n") == 1 and "did you mean 'mixtral-8x7b'?" in err


def test_check_tells_random_weights_and_a_foreign_tokenizer(capsys, folders, tmp_path):
    code, told, _ = run(capsys, "check", str(folders / "sparse"), "--json")
    assert code == 1 and json.loads(told)["verdict"] in ("untrained", "wrong")
    theirs("qwen3_moe", QWEN).save_pretrained(tmp_path)  # a vocabulary of 48
    code, _, err = run(capsys, "check", str(tmp_path), "--tokenizer", str(TOKENIZER))
    assert code == 2 and "the tokenizer is another model's" in err
    code, _, err = run(capsys, "check", str(tmp_path))
    assert code == 2 and "none can be read from it" in err and err.count("\n") == 1


def test_upcycle_writes_what_transformers_loads_and_computes_the_same(capsys, folders, tmp_path):
    words = ("--experts", "4", "--top-k", "2", "--granularity", "2", "--json")
    code, told, _ = run(capsys, "upcycle", str(folders / "dense"), str(tmp_path / "moe"), *words)
    told = json.loads(told)
    assert code == 0 and told["format"] == "qwen3_moe" and told["largest_change"] < 1e-5
    dense, sparse = (AutoModelForCausalLM.from_pretrained(path) for path in (folders / "dense", tmp_path / "moe"))
    ids = torch.tensor([[3, 4, 5, 6]])
    assert sparse.config.num_experts == 4 and sparse.config.moe_intermediate_size == 12
    torch.testing.assert_close(sparse(ids).logits, dense(ids).logits, rtol=1e-4, atol=1e-4)
    assert (tmp_path / "moe" / "tokenizer_config.json").is_file()


@pytest.mark.parametrize(
    ("model_type", "values", "kind"),
    [
        ("llama", {"rope_parameters": LLAMA3}, "mixtral"),
        ("mistral", {"sliding_window": 9}, "mixtral"),
        ("qwen2", {}, "moe_zoo, with its code"),  # transformers' Qwen2-MoE always has a shared expert
    ],
)
def test_an_upcycled_model_is_of_the_family_that_has_its_numbers(capsys, tmp_path, model_type, values, kind):
    theirs(model_type, ROOM | values).save_pretrained(tmp_path / "dense")
    words = ("--experts", "4", "--top-k", "1", "--json")
    code, told, err = run(capsys, "upcycle", str(tmp_path / "dense"), str(tmp_path / "moe"), *words)
    assert code == 0, err
    assert json.loads(told)["format"] == kind and json.loads(told)["largest_change"] < 1e-5
    ids = torch.tensor([[3, 4, 5, 6] * 4])
    dense, sparse = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("dense", "moe"))
    torch.testing.assert_close(sparse(ids).logits, dense(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("verb", "words", "is_kept"),
    [
        ("split-experts", ("--parts", "3"), True),
        ("grow-experts", ("--copies", "2"), True),
        ("prune-experts", ("--experts", "4"), False),
        ("merge-experts", ("--size", "2"), False),
    ],
)
def test_surgery_of_a_folder(capsys, folders, tmp_path, verb, words, is_kept):
    text = tmp_path / "text.txt"
    text.write_text("def count(animals):\n    return len(animals)\n")
    more = ("--text", str(text)) if verb in ("prune-experts", "merge-experts") else ()
    code, told, err = run(capsys, verb, str(folders / "sparse"), str(tmp_path / "out"), *words, *more, "--json")
    assert code == 0, err
    assert (json.loads(told)["largest_change"] < 1e-5) == is_kept
    assert moe_zoo.load(tmp_path / "out").model.architecture.num_experts != 6
    code, _, err = run(capsys, verb, str(folders / "sparse"), str(tmp_path / "out"), *words, *more)
    assert code == 2 and "not empty; nothing is written over" in err


def test_text_from_a_model_of_another_family(capsys, folders):
    code, text, err = run(
        capsys, "generate", str(folders / "sparse"), "def main(", "--tokens", "5", "--temperature", "0"
    )
    assert code == 0 and text.startswith("def main("), err
    code, _, err = run(capsys, "generate", str(folders / "sparse"), "--tokens", "5")  # this tokenizer adds no bos
    assert (code, err.count("\n")) == (2, 1) and "give a prompt" in err


def test_a_text_or_a_place_that_will_not_do_is_one_line(capsys, folders, tmp_path):
    theirs("qwen3_moe", QWEN).save_pretrained(tmp_path / "small")  # a vocabulary of 48
    for file in TOKENIZER.glob("tokenizer*"):
        shutil.copy2(file, tmp_path / "small")
    for name, words in (("text", "def count(animals):\n" * 400), ("empty", "")):
        (tmp_path / name).write_text(words)
    sparse, dense, small, out = *(str(folders / name) for name in ("sparse", "dense")), str(tmp_path / "small"), "out"
    prune = ("--experts", "4", "--text", str(tmp_path / "text"))
    for words, told in (
        (("prune-experts", small, str(tmp_path / out), *prune), "the tokenizer is another model's"),
        (("generate", small, "def count("), "the tokenizer is another model's"),
        (("prune-experts", dense, str(tmp_path / out), *prune), "experts: the model is dense"),
        (("prune-experts", sparse, str(tmp_path / out), *prune[:-1], str(tmp_path / "empty")), "it holds no token"),
        (("check", sparse, "--text", str(tmp_path / "empty")), "check: the text is 0 tokens"),
        (("prune-experts", sparse, str(tmp_path / "text"), *prune), "choose another place"),
        (("prune-experts", sparse, str(tmp_path / "text" / "x"), *prune), "choose another place"),
        (("card", "--all", str(tmp_path / "text")), "give a folder that can be written"),
    ):
        code, _, err = run(capsys, *words)
        assert (code, err.count("error: ")) == (2, 1) and told in err.splitlines()[-1], err
    code, _, err = run(capsys, "prune-experts", sparse, str(tmp_path / out), *prune)  # more than is read at once
    assert code == 0, err


def test_a_folder_comes_before_a_preset_of_its_name(capsys, folders, tmp_path, monkeypatch):
    shutil.copytree(folders / "sparse", tmp_path / "topk-lm-test")
    assert moe_zoo.load("topk-lm-test").model.architecture.num_experts == 4
    monkeypatch.chdir(tmp_path)
    assert moe_zoo.load("topk-lm-test").model.architecture.num_experts == 6
    assert json.loads(run(capsys, "info", "topk-lm-test", "--json")[1])["experts"] == 6
