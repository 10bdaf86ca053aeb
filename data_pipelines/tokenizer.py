"""Tokenizers: load a folder of tokenizers/, whose files are checked against its SHA256SUMS."""

from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from data_pipelines.errors import DataError

MODEL, CONFIG, SUMS, SPEC, EVAL = "tokenizer.model", "tokenizer_config.json", "SHA256SUMS", "train.yaml", "eval.json"
SPACE = "\u2581"  # sentencepiece writes a space so; the same character in a text must go by its bytes


@dataclass(frozen=True)
class Tokenizer:
    """A lossless sentencepiece model: ``decode(encode(text)) == text`` for every UTF-8 text."""

    folder: Path
    sha256: str  # of tokenizer.model
    processor: Any = field(repr=False)

    @property
    def vocab_size(self) -> int:
        return self.processor.vocab_size()

    @property
    def bos_id(self) -> int:
        return self.processor.bos_id()

    @property
    def eos_id(self) -> int:
        return self.processor.eos_id()

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without bos or eos."""
        first, *others = text.split(SPACE)
        ids = self.processor.encode(first)
        for part in others:
            ids += self._space_bytes + self.processor.encode(part)
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of ``ids``; bos, eos and pad stand for nothing."""
        return self.processor.decode(ids)

    @cached_property
    def _space_bytes(self) -> list[int]:
        return [self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]

    @cached_property
    def token_bytes(self) -> NDArray[np.int64]:
        """(vocab_size,) bytes of text that each id stands for; 0 for bos, eos, pad and unk."""
        return np.array([self._bytes_of(id) for id in range(self.vocab_size)], dtype=np.int64)

    def _bytes_of(self, id: int) -> int:
        if self.processor.is_control(id) or self.processor.is_unknown(id):
            return 0
        if self.processor.is_byte(id):
            return 1
        return len(self.processor.id_to_piece(id).replace(SPACE, " ").encode())


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Open a tokenizer folder, or say which file is missing or altered."""
    folder = Path(folder)
    check_sums(folder)
    model = (folder / MODEL).read_bytes()
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    if processor.bos_id() < 0 or processor.eos_id() < 0:
        raise DataError(f"{folder / MODEL}: no bos or eos piece; documents need both; train it with bos_id and eos_id")
    return Tokenizer(folder, sha256(model).hexdigest(), processor)


def train_tokenizer(spec_file: str | Path) -> None:
    """Read tokenizers/<name>/train.yaml; write the model, its configuration, evaluation and SHA256SUMS beside it."""
    from data_pipelines.tokenizer_training import train  # only training reads YAML and corpora

    train(Path(spec_file))


def check_sums(folder: Path) -> None:
    """Compare every file that SHA256SUMS names with its recorded hash."""
    for name, expected in read_sums(folder).items():
        path = folder / name
        actual = sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
        if actual != expected:
            raise DataError(
                f"{path}: sha256 {actual[:16]}, {SUMS} says {expected[:16]}; a tokenizer must not change under "
                f"prepared data; restore the file, or train the tokenizer again"
            )


def read_sums(folder: Path) -> dict[str, str]:
    """File name -> sha256, in the format of the ``sha256sum`` command."""
    if not (folder / SUMS).is_file():
        raise DataError(f"{folder}: no {SUMS}; a tokenizer folder is written by train_tokenizer; check the path")
    lines = [line.split() for line in (folder / SUMS).read_text().splitlines()]
    sums = {line[1]: line[0] for line in lines if len(line) == 2}
    if MODEL not in sums:
        raise DataError(f"{folder / SUMS}: does not name {MODEL}; every tokenizer has one; restore the folder")
    return sums
