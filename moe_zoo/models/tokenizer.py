"""The tokenizer beside a model."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from moe_zoo.spec.errors import CheckpointError


def check_ids(ids: list[int], vocab_size: int, where: str) -> list[int]:
    """``ids``, if the model has a row for each. Raises ``CheckpointError``."""
    if ids and max(ids) >= vocab_size:
        raise CheckpointError(
            f"{where}; its tokenizer gives id {max(ids)}, the model has {vocab_size} rows; the tokenizer is another model's; "
            f"give the right one with --tokenizer where the command has it, or copy its files beside the model"
        )
    return ids


def read_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub id. Raises ``CheckpointError`` if there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if tokenizer("a")["input_ids"]:  # of a folder without one, transformers may make one that knows no word
            return tokenizer
        reason = "it gives no ids"
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
    raise CheckpointError(
        f"tokenizer: {folder}; none can be read from it ({reason}); copy its files beside the model, or name another with "
        f"--tokenizer where the command has it"
    )
