"""Continue a prompt with a saved model: what ``moe-zoo generate`` does."""

from pathlib import Path

import torch
from transformers import AutoTokenizer

from moe_zoo.models.hub import load, without_progress_bars
from moe_zoo.spec.errors import CheckpointError
from moe_zoo.spec.presets import preset_names


def generate_text(model: str | Path, prompt: str, *, num_tokens: int, temperature: float = 0.8, seed: int = 0) -> str:
    """Up to ``num_tokens`` new tokens after ``prompt``, as text. ``temperature`` 0 takes the likeliest each time.

    ``model`` is a folder that ``save_pretrained`` wrote, a run's folder with such a ``model`` inside, or a Hub id.
    """
    inside = Path(model) / "model"
    folder = inside if (inside / "config.json").is_file() else model
    if str(model) in preset_names():
        raise CheckpointError(f"generate: {model}; a preset has fresh weights and no tokenizer; give a trained model")
    with without_progress_bars():
        network = load(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"generate: {folder}; text needs a tokenizer beside the model ({reason}); copy its files there"
        ) from None
    ids = [network.config.bos_token_id, *tokenizer.encode(prompt, add_special_tokens=False)]
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    if network.config.is_encoder_decoder:  # trained to go on: the decoder begins with the last token of the prompt
        sampling |= {"decoder_input_ids": torch.tensor([ids[-1:]]), "decoder_start_token_id": ids[-1]}
        text, num_given = ids[:-1] or ids, 1
    else:
        text, num_given = ids, len(ids)
    out = network.generate(
        torch.tensor([text]),
        attention_mask=torch.ones(1, len(text), dtype=torch.long),
        max_new_tokens=num_tokens,
        **sampling,
    )
    return tokenizer.decode(out[0, num_given:], skip_special_tokens=True)
