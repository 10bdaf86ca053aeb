"""Train a tokenizer from tokenizers/<name>/train.yaml and write its files beside it."""

import io
import json
import platform
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import sentencepiece
import yaml

from data_pipelines.corpus import documents, is_heldout
from data_pipelines.errors import DataError
from data_pipelines.files import write_atomically
from data_pipelines.tokenizer import CONFIG, EVAL, MODEL, SPACE, SPEC, SUMS, Tokenizer, load_tokenizer

LOSSLESS = {  # what makes decode(encode(text)) == text; a spec cannot change these
    "model_type": "bpe",
    "normalization_rule_name": "identity",
    "byte_fallback": True,
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "pad_id": 3,
}
HEADS = {"corpus", "vocab_size", "heldout_percent", "options"}
TRANSFORMERS_CONFIG = {  # AutoTokenizer then gives sentencepiece's own ids, without bos or eos
    "tokenizer_class": "LlamaTokenizer",
    "legacy": False,
    "add_prefix_space": False,
    "add_bos_token": False,
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
}


def train(spec_file: Path) -> None:
    """Train on the train split of the corpus, evaluate on its held-out files, write everything beside ``spec_file``."""
    spec, folder = _read_spec(spec_file), spec_file.parent
    texts, heldout = _split(spec["corpus"], spec["heldout_percent"])
    write_atomically(folder / MODEL, _train(texts, spec))
    write_atomically(folder / CONFIG, _as_json(TRANSFORMERS_CONFIG))
    _write_sums(folder, [spec_file.name, MODEL, CONFIG])
    tokenizer = load_tokenizer(folder)
    write_atomically(folder / EVAL, _as_json(_evaluate(tokenizer, spec, texts, heldout)))
    _write_sums(folder, [spec_file.name, MODEL, CONFIG, EVAL])


def _read_spec(spec_file: Path) -> dict:
    try:
        written = yaml.safe_load(spec_file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{spec_file}: {error.strerror}; a tokenizer's folder holds a {SPEC}; check the path") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{spec_file}: {' '.join(str(error).split())}; must be YAML; correct it there") from None
    if not isinstance(written, dict):
        raise DataError(f"{spec_file}: {type(written).__name__}; must be a group of keys; begin with 'corpus: ...'")
    spec = {"heldout_percent": 5, "options": {}} | written
    wrong = sorted(HEADS.symmetric_difference(spec)) + sorted(set(LOSSLESS).intersection(spec["options"]))
    if wrong or spec_file.name != SPEC:
        raise DataError(
            f"{spec_file}: {', '.join(wrong) or spec_file.name}; a tokenizer spec is a {SPEC} with corpus, vocab_size, "
            f"heldout_percent and options other than {', '.join(LOSSLESS)}; change the file"
        )
    return spec


def _split(corpus: str, percent: int) -> tuple[list[str], list[str]]:
    split: tuple[list[str], list[str]] = [], []
    for document in documents(corpus):
        split[is_heldout(document.name, percent)].append(document.text)
    return split


def _train(texts: list[str], spec: dict) -> bytes:
    model = io.BytesIO()
    options: dict[str, Any] = LOSSLESS | spec["options"]
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=model,
            vocab_size=spec["vocab_size"],
            pad_piece="<pad>",
            user_defined_symbols=["\n"],  # sentencepiece learns from lines and would never see one
            num_threads=1,
            minloglevel=2,
            **options,
        )
    except RuntimeError as error:
        last = str(error).splitlines()[-1][:200]
        raise DataError(f"vocab_size: {spec['vocab_size']}; sentencepiece says {last!r}; change {SPEC}") from error
    return model.getvalue()


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from filter(None, text.replace(SPACE, " ").replace("\0", " ").split("\n"))


def _evaluate(tokenizer: Tokenizer, spec: dict, train: list[str], heldout: list[str]) -> dict:
    texts = heldout or train
    ids = [tokenizer.encode(text) for text in texts]
    num_bytes, num_tokens = sum(len(t.encode()) for t in texts), sum(map(len, ids))
    return {
        "corpus": spec["corpus"],
        "python": platform.python_version(),
        "train_documents": len(train),
        "heldout_documents": len(heldout),
        "heldout_bytes": num_bytes,
        "heldout_tokens": num_tokens,
        "bytes_per_token": round(num_bytes / num_tokens, 4),
        "round_trip_exact": all(tokenizer.decode(i) == text for i, text in zip(ids, texts, strict=True)),
        "byte_counts_exact": num_bytes == sum(int(tokenizer.token_bytes[i].sum()) for i in ids),
    }


def _as_json(value: dict) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _write_sums(folder: Path, names: list[str]) -> None:
    lines = [f"{sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    write_atomically(folder / SUMS, "".join(lines).encode())
