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


PIPELINES = ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def split(engine: str, axes: dict, **changes) -> None:
    changes |= {f"parallel__{name}": value for name, value in axes.items()}
    if "pp" in axes:
        changes |= {"train__micro_batches": 4}
    world = axes.get("pp", 1) * axes.get("tp", 1) * axes.get("cp", 1) * axes.get("replicate", 1)
    check(encdec_recipe(engine, **changes), world_size=max(2, world))


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize(
    "axes",
    [
        {"tp": 2, "ep": 2},
        {"cp": 2, "context": "gather"},
        {"cp": 2, "context": "ulysses", "ep": 2},
        pytest.param({"replicate": 2}, marks=pytest.mark.slow),
        *(pytest.param({"pp": 2, "schedule": name}, marks=pytest.mark.slow) for name in PIPELINES),
    ],
    ids=str,
)
def test_two_ranks(engine, axes):
    split(engine, axes)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize(
    "axes",
    [
        {"tp": 2, "cp": 2, "ep": 2, "etp": 2},
        {"pp": 2, "tp": 2, "ep": 2, "schedule": "ZBVZeroBubble"},
        {"pp": 2, "cp": 2, "ep": 2, "schedule": "Interleaved1F1B"},
        pytest.param({"pp": 2, "cp": 2, "context": "ulysses", "schedule": "DualPipeV"}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "cp": 2, "context": "ulysses"}, marks=pytest.mark.slow),
        pytest.param({"tp": 4, "ep": 2}, marks=pytest.mark.slow),
        pytest.param({"replicate": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "replicate": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_four_ranks(engine, axes):
    split(engine, axes)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("recompute", [1, "selective"])
def test_recompute_and_weights_gathered_once_with_a_head_of_its_own(engine, recompute):
    split(engine, {"tp": 2}, parallel__recompute=recompute, parallel__gather="step", model__tie_embeddings=False)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("scope", [pytest.param("sequence", marks=pytest.mark.slow), "global_batch"])
def test_the_scope_of_balance_where_halves_have_different_lengths(engine, scope):
    split(engine, {"tp": 2, "cp": 2}, balance__scope=scope)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_every_layer_sparse_and_a_global_balance_through_a_pipeline(engine):
    """As in Switch-C: transformers balances nothing here."""
    moe = {"router": ROUTER, "experts": {"d_ff": 12, "activation": "relu", "gated": False}}
    changes = {"model__moe": moe, "model__tie_embeddings": False, "balance__scope": "global_batch"}
    split(engine, {"pp": 2, "ep": 2, "schedule": "DualPipeV", "replicate": 1, "tp": 2}, **changes)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_sparse_layers_in_the_encoder_alone_shared_experts_and_static_capacity(engine):
    moe = {"router": ROUTER, "experts": FFN, "shared": {"d_ff": 8}, "dense_layers": [2, 3]}
    changes = {"model__moe": moe, "parallel__dispatch": "padded", "parallel__reduce": "micro_batch"}
    split(engine, {"tp": 2, "ep": 2}, **changes)
