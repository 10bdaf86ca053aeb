"""Continue a prompt with a saved model: what ``moe-zoo generate`` does."""

from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from moe_zoo.models.hub import load, without_progress_bars
from moe_zoo.models.tokenizer import check_ids, read_tokenizer
from moe_zoo.spec.errors import CheckpointError
from moe_zoo.spec.presets import is_preset


def generate_text(model: str | Path, prompt: str, *, num_tokens: int, temperature: float = 0.8, seed: int = 0) -> str:
    """Up to ``num_tokens`` new tokens after ``prompt``, as text. ``temperature`` 0 takes the likeliest each time.

    ``model`` is a folder that ``save_pretrained`` wrote, a run's folder with such a ``model`` inside, or a Hub id.
    """
    inside = Path(model) / "model"
    folder = inside if (inside / "config.json").is_file() else model
    if is_preset(str(model)):
        raise CheckpointError(f"generate: {model}; a preset has fresh weights and no tokenizer; give a trained model")
    with without_progress_bars():
        network = load(folder)
    tokenizer = read_tokenizer(folder)
    ids = check_ids(
        _prompt_ids(network, tokenizer, prompt), network.model.architecture.vocab_size, f"generate: {model}"
    )
    if not ids:
        raise CheckpointError(f"generate: {model}; it has no token that begins a text; give a prompt")
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


def _prompt_ids(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """As the model was trained: ours always begin with bos, others as their tokenizer has it."""
    if network.config.upstream is not None:
        return list(tokenizer(prompt)["input_ids"])
    bos = getattr(network.config, "bos_token_id", None)
    return [*([] if bos is None else [bos]), *tokenizer.encode(prompt, add_special_tokens=False)]
