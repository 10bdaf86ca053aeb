"""Every rank goes on with the same token, though their logits may differ in the last bits."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from moe_zoo.testing import run_distributed
from moe_zoo.train.sampling import sample


def likes_its_rank(rows) -> torch.Tensor:
    """Logits that the ranks do not agree on at all: what rounding does now and then, every time."""
    logits = torch.zeros(8)
    logits[3 + dist.get_rank()] = 50.0
    return logits


def text_of_this_rank() -> list[int]:
    mesh, recipe = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(data=SimpleNamespace(seq_len=4))
    engine = SimpleNamespace(module=torch.nn.Module(), next_token_logits=likes_its_rank, mesh=mesh, recipe=recipe)
    return sample(engine, [1], 5, vocab_size=8, eos_id=4, seed=0)


def test_ranks_whose_logits_differ_write_the_same_text_and_end_together():
    assert run_distributed(text_of_this_rank) == [[3] * 5] * 2
