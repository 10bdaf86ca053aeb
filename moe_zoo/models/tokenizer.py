"""The tokenizer beside a model."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from moe_zoo.spec.errors import CheckpointError


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
