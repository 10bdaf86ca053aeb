"""Text from a model that is spread over ranks: every rank runs the same prompt, and the first one draws."""

import torch
import torch.distributed as dist
from torch import Tensor

from moe_zoo.engines import Engine
from moe_zoo.ops.documents import IGNORED, PackedRows
from moe_zoo.spec.recipe import row_parts


@torch.no_grad()
def sample(
    engine: Engine, prompt: list[int], num_tokens: int, *, vocab_size: int, eos_id: int, seed: int, temperature=0.8
) -> list[int]:
    """Continue ``prompt`` (token ids) by up to ``num_tokens``. Collective; no cache: it is a look, not a service.

    ``vocab_size`` is the tokenizer's: a model may have more rows, which stand for no text. An encoder-decoder reads the
    prompt as it does in training, ``encoder_len`` tokens of it, filled up in front with its first one; the decoder
    begins with its last.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, device, data = list(prompt), engine.mesh.device, engine.recipe.data
    window, encoder_ids, num_before = row_parts(data)[-1], None, 0
    if data.encoder_len is not None:
        num_before = len(prompt) - 1
        text = [prompt[0]] * data.encoder_len + tokens[:num_before]
        encoder_ids = torch.tensor([text[-data.encoder_len :]], device=device)
    engine.module.eval()
    for _ in range(num_tokens):
        input_ids = torch.tensor([tokens[num_before:][-window:]], device=device)
        logits = engine.next_token_logits(_rows(input_ids, encoder_ids))[:vocab_size]
        probs = (logits.float().cpu() / temperature).softmax(-1)
        drawn = torch.multinomial(probs, 1, generator=generator).to(device)
        # Equal rows at other places of a product differ in their last bits: a rank could draw another token, see the
        # end earlier, and leave the others waiting.
        dist.broadcast(drawn, src=0)
        tokens.append(int(drawn))
        if tokens[-1] == eos_id:
            break
    return tokens[len(prompt) :]


def _rows(input_ids: Tensor, encoder_ids: Tensor | None = None) -> PackedRows:
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    return PackedRows(input_ids, torch.full_like(input_ids, IGNORED), positions, None, encoder_ids)
