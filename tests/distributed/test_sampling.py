"""Every rank goes on with the same token, though their logits may differ in the last bits."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from moe_zoo.comm.mesh import Mesh
from moe_zoo.engines import make_engine
from moe_zoo.parallel.build import build_model
from moe_zoo.spec.layout import resolve_layout
from moe_zoo.testing import run_distributed
from moe_zoo.train.sampling import _rows, sample
from tests.distributed.test_encoder_decoder_law import encdec_recipe
from tests.distributed.test_layout_law import split_recipe


def likes_its_rank(rows) -> torch.Tensor:
    """Logits that the ranks do not agree on at all: what rounding does now and then, every time."""
    logits = torch.zeros(8)
    logits[3 + dist.get_rank()] = 50.0
    return logits


def text_of_this_rank() -> list[int]:
    mesh, recipe = (
        SimpleNamespace(device=torch.device("cpu")),
        SimpleNamespace(data=SimpleNamespace(seq_len=4, encoder_len=None)),
    )
    engine = SimpleNamespace(module=torch.nn.Module(), next_token_logits=likes_its_rank, mesh=mesh, recipe=recipe)
    return sample(engine, [1], 5, vocab_size=8, eos_id=4, seed=0)


def test_ranks_whose_logits_differ_write_the_same_text_and_end_together():
    assert run_distributed(text_of_this_rank) == [[3] * 5] * 2


# ---------------------------------------------------------------------- a prefix that the ranks cannot share evenly

PREFIXES = (1, 5, 11)
ROUTERS = [
    {},
    {"capacity_factor": 1.0, "eval_capacity_factor": 1.0},
    {"choice": "expert"},
]


def logits_after(recipe) -> list[torch.Tensor]:
    """On a rank: logits after prefixes of several lengths."""
    world = torch.distributed.get_world_size()
    mesh = Mesh(resolve_layout(recipe, world, world), torch.device("cpu"))
    engine = make_engine(build_model(recipe, mesh, 3), mesh, recipe)
    return [engine.next_token_logits(_rows(torch.arange(2, 2 + length)[None])) for length in PREFIXES]


@pytest.mark.parametrize("router", ROUTERS, ids=["dropless", "capacity", "experts choose"])
def test_what_pads_a_prefix_takes_no_capacity_from_it(router):
    router = {"num_experts": 8, "top_k": 2} | router
    found = [
        run_distributed(
            logits_after,
            split_recipe("fsdp", **axes, model__moe__router=router, balance={"method": "none"}),
            world_size=ranks,
        )[0]
        for axes, ranks in (({}, 1), ({"parallel__tp": 2, "parallel__cp": 2}, 4))
    ]
    for alone, spread in zip(*found, strict=True):
        torch.testing.assert_close(spread, alone, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------- a prompt that an encoder reads


def text_of_an_encoder_decoder(recipe) -> list[list[int]]:
    """On a rank: what it writes after prompts of several lengths."""
    world = torch.distributed.get_world_size()
    mesh = Mesh(resolve_layout(recipe, world, world), torch.device("cpu"))
    engine = make_engine(build_model(recipe, mesh, 3), mesh, recipe)
    return [
        sample(engine, list(range(2, 2 + length)), 10, vocab_size=36, eos_id=-1, seed=0, temperature=0.05)
        for length in (1, 5, 20)
    ]


def test_an_encoder_reads_the_prompt_and_every_layout_writes_the_same():
    router = {"num_experts": 6, "capacity_factor": 1.0, "eval_capacity_factor": 1.0}
    moe = {"router": router, "experts": {"d_ff": 12}}
    layouts = (
        ({}, 1),
        ({"parallel__tp": 2, "parallel__cp": 2}, 4),
        ({"parallel__pp": 2, "parallel__schedule": "DualPipeV"}, 2),
    )
    alone, *spread = (
        run_distributed(
            text_of_an_encoder_decoder,
            encdec_recipe("fsdp", **axes, model__moe=moe, train__micro_batches=4),
            world_size=ranks,
        )[0]
        for axes, ranks in layouts
    )
    assert len(alone[0]) == 10 and alone[0] != alone[1]
    assert spread == [alone] * 2
