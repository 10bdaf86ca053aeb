"""The encoder-decoder takes the steps of one process in every layout that a decoder has."""

import pytest

from tests.distributed.test_layout_law import ENGINES
from tests.law import check, make_recipe

ROUTER = {"num_experts": 6, "capacity_factor": 1.0, "jitter": 0.05}
FFN = {"d_ff": 12, "activation": "gelu", "gated": True}


def encdec_recipe(engine: str, zero_stage: int = 3, **changes):
    """Both halves of a row, of different lengths, can be shared by four ranks; of each half's blocks the second is sparse."""
    base = {
        "parallel__engine": engine,
        "parallel__zero_stage": zero_stage,
        "data__seq_len": 24,
        "data__encoder_len": 16,
        "model__vocab_size": 36,
        "model__num_layers": 4,
        "model__encoder": {"num_layers": 2},
        "model__attention": {"num_heads": 4, "head_dim": 4, "buckets": 8, "max_distance": 12},
        "model__moe": {"router": ROUTER, "experts": FFN, "first_layer": 1, "every": 2},
        "model__tie_embeddings": True,
    }
    return make_recipe(**base | changes)


@pytest.mark.parametrize(("engine", "zero_stage"), ENGINES)
def test_two_ranks_that_share_the_batch_and_the_experts(engine, zero_stage):
    check(encdec_recipe(engine, zero_stage, parallel__ep=2), world_size=2)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize(
    "axes",
    [
        {"tp": 2},
        {"tp": 2, "ep": 2, "etp": 1},
        {"cp": 2},
        {"cp": 2, "context": "ulysses"},
        {"replicate": 2},
        {"pp": 2},
        {"pp": 2, "schedule": "GPipe"},
        {"pp": 2, "schedule": "Interleaved1F1B"},
        {"pp": 2, "schedule": "InterleavedZeroBubble"},
        {"pp": 2, "schedule": "ZBVZeroBubble"},
        {"pp": 2, "schedule": "DualPipeV"},
    ],
    ids=lambda axes: " ".join(f"{name}{value}" for name, value in axes.items()),
)
def test_two_ranks(engine, axes):
    changes = {f"parallel__{name}": value for name, value in axes.items()}
    if "pp" in axes:
        changes |= {"train__micro_batches": 4}
    check(encdec_recipe(engine, **changes), world_size=2)
