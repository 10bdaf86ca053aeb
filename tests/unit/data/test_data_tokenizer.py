"""Tokenizers: lossless, exact byte counts, the ids of AutoTokenizer, checked against their sums."""

import json
import shutil
import sysconfig
from pathlib import Path

import pytest

from data_pipelines import DataError, load_tokenizer, train_tokenizer

SHIPPED = sorted(Path(__file__).parents[3].glob("tokenizers/*/SHA256SUMS"))
PROBES = [
    "hello world",
    "",
    " ",
    "\n",
    "  leading and trailing  ",
    "def f(a):\n\n\n    if a:\n\treturn 0x1F\r\n",
    "日本語 ünï 🎉\0",
    "\u00a0\u3000\ufeff\u200b",
    "x" * 3000,
]


@pytest.fixture(params=[*SHIPPED, None], ids=lambda sums: sums.parent.name if sums else "trained-now")
def tokenizer(request, tokenizer_folder):
    return load_tokenizer(request.param.parent if request.param else tokenizer_folder)


def test_there_are_shipped_tokenizers():
    assert SHIPPED and not list(SHIPPED[0].parents[1].rglob("*.py"))


@pytest.mark.parametrize("sums", SHIPPED, ids=lambda sums: sums.parent.name)
def test_a_shipped_evaluation_is_lossless_and_short(sums):
    told = json.loads((sums.parent / "eval.json").read_text())
    assert told["round_trip_exact"] and told["byte_counts_exact"] and told["bytes_per_token"] > 2.4


@pytest.mark.parametrize("text", [*PROBES, "\u2581", "a \u2581\u2581 b", "<s></s>"])
def test_round_trip_is_lossless_and_bytes_are_exact(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())


def test_round_trip_of_a_real_module(tokenizer):
    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and len(ids) < len(text.encode())


def test_autotokenizer_gives_the_same_ids(tokenizer):
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(tokenizer.folder)
    assert (other.bos_token_id, other.eos_token_id, len(other)) == (
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.vocab_size,
    )
    for text in [*PROBES, Path(sysconfig.get_path("stdlib"), "bisect.py").read_text()]:
        assert other(text)["input_ids"] == tokenizer.encode(text)
        assert other.decode(tokenizer.encode(text)) == text


def test_specials_stand_for_no_text(tokenizer):
    assert tokenizer.token_bytes[[0, tokenizer.bos_id, tokenizer.eos_id, 3]].tolist() == [0, 0, 0, 0]
    assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode("a"), tokenizer.eos_id]) == "a"
    assert len(tokenizer.token_bytes) == tokenizer.vocab_size


def test_training_again_gives_the_same_model(tokenizer_folder, tmp_path):
    shutil.copy(tokenizer_folder / "train.yaml", tmp_path)
    train_tokenizer(tmp_path / "train.yaml")
    assert (tmp_path / "SHA256SUMS").read_text() == (tokenizer_folder / "SHA256SUMS").read_text()


@pytest.mark.parametrize("name", ["tokenizer.model", "train.yaml", "tokenizer_config.json", "eval.json"])
def test_an_altered_file_is_named(tokenizer_folder, tmp_path, name):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "copy", ignore=shutil.ignore_patterns("texts"))
    (folder / name).write_bytes((folder / name).read_bytes() + b"\n")
    with pytest.raises(DataError, match=rf"{name}: sha256 \w{{16}}, SHA256SUMS says \w{{16}}; .*; restore"):
        load_tokenizer(folder)


def test_a_missing_folder_and_a_missing_file_are_named(tokenizer_folder, tmp_path):
    with pytest.raises(DataError) as error:
        load_tokenizer(tmp_path / "none")
    assert str(error.value) == (
        f"{tmp_path}/none: no SHA256SUMS; a tokenizer folder is written by train_tokenizer; check the path"
    )
    shutil.copy(tokenizer_folder / "SHA256SUMS", tmp_path)
    with pytest.raises(DataError, match="sha256 missing"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("corpus: {0}\nvocab: 300\n", r"train.yaml: vocab, vocab_size; a tokenizer spec is"),
        ("corpus: {0}\nvocab_size: 300\noptions: {{bos_id: 5}}\n", r"train.yaml: bos_id; a tokenizer spec is"),
        ("- 1\n", r"train.yaml: list; must be a group of keys; begin with 'corpus: ...'$"),
        ("corpus: [\n", r"train.yaml: while parsing .*; must be YAML; correct it there$"),
        ("corpus: {0}\nvocab_size: 99999\n", r"vocab_size: 99999; sentencepiece says .*; change train.yaml"),
    ],
)
def test_a_wrong_spec_is_refused(tokenizer_folder, tmp_path, body, text):
    (tmp_path / "train.yaml").write_text(body.format(tokenizer_folder / "texts"))
    with pytest.raises(DataError, match=text):
        train_tokenizer(tmp_path / "train.yaml")


def test_a_spec_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(DataError) as error:
        train_tokenizer(tmp_path / "train.yaml")
    assert str(error.value) == (
        f"{tmp_path}/train.yaml: No such file or directory; a tokenizer's folder holds a train.yaml; check the path"
    )
