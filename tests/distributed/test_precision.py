"""bf16 products over fp32 master weights: near fp32, the same on both engines, and exact when resumed."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_zoo.comm.mesh import Mesh
from moe_zoo.engines import make_engine
from moe_zoo.parallel.build import build_model
from moe_zoo.spec.engine import engine_name
from moe_zoo.spec.errors import PlanError
from moe_zoo.spec.layout import resolve_layout
from moe_zoo.spec.presets import load_preset
from moe_zoo.spec.recipe import Recipe
from moe_zoo.testing import run_distributed
from moe_zoo.train.feed import Feed
from tests.helpers import assert_same_bits, losses, moved, on_ranks, state

ENGINES = [("deepspeed", 2), ("deepspeed", 3), ("fsdp", 2), ("fsdp", 3)]
STEPS, LR = 3, 1e-2
BF16_EPS = 2**-8  # a rounded value's largest relative error; rounding errors of a mean over 250 tokens mostly cancel


def recipe_of(values: dict, engine: str, zero_stage: int, compute: str, **axes) -> Recipe:
    parallel = {"engine": engine, "zero_stage": zero_stage, "ep": 2} | axes
    return Recipe.from_dict(values | {"parallel": parallel, "precision": {"compute": compute}})


def three_steps(values: dict, engine: str, zero_stage: int, compute: str, axes: dict) -> dict:
    """On a rank: losses, whole master weights, and the dtypes of what would be saved."""
    recipe = recipe_of(values, engine, zero_stage, compute, **axes)
    mesh = Mesh(resolve_layout(recipe, dist.get_world_size(), dist.get_world_size()), torch.device("cpu"))
    placed = build_model(recipe, mesh, seed=0)
    initial = torch.cat([param.detach().flatten() for param in placed.module.parameters()])
    made = make_engine(placed, mesh, recipe)
    assert torch.equal(initial, torch.cat([made.weight(name).flatten() for name in made.named])), "no bit is lost"
    feed = Feed(recipe, mesh, step=0)
    found = {"losses": [made.step(next(feed), LR).loss for _ in range(STEPS)]}
    feed.close()
    found["saved"] = {tensor.dtype for shard in made.shards() for tensor in shard.tensors.values()}
    found["buffers"] = {buffer.dtype for buffer in made.module.buffers()}
    found["weights"] = torch.cat([made.weight(name).flatten() for name in made.named])
    return found


def mean_distance(ours: dict, theirs: dict) -> float:
    return (ours["weights"] - theirs["weights"]).abs().mean().item()


def test_bf16_on_either_engine_stays_near_fp32_and_nearer_to_the_other_engine(run_values):
    wide, *narrow = (
        run_distributed(three_steps, run_values, *engine, compute, {})[0]
        for engine, compute in [(("fsdp", 3), "fp32"), *((engine, "bf16") for engine in ENGINES)]
    )
    for found in narrow:
        assert found["losses"] == pytest.approx(wide["losses"], rel=BF16_EPS)
        assert found["losses"][0] != wide["losses"][0], "the products are in bf16"
        assert found["saved"] == found["buffers"] == {found["weights"].dtype} == {torch.float32}
        assert not torch.equal(found["weights"], found["weights"].bfloat16().float()), (
            "masters have more bits than bf16"
        )
        assert mean_distance(found, wide) < LR / 20
    first = narrow[0]
    for found in narrow[1:]:
        assert found["losses"][0] == first["losses"][0], "the same weights, rounded alike"
        assert found["losses"] == pytest.approx(
            first["losses"], rel=BF16_EPS / 4
        )  # gradients are summed in other orders
        assert mean_distance(found, first) < mean_distance(found, wide) / 2


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("axes", [{"tp": 2}, {"cp": 2}, {"cp": 2, "context": "ulysses"}], ids=str)
def test_bf16_over_split_matrices_and_rows_stays_near_fp32(run_values, engine, axes):
    wide, narrow = (
        run_distributed(three_steps, run_values, engine, 3, compute, axes)[0] for compute in ("fp32", "bf16")
    )
    assert narrow["losses"] == pytest.approx(wide["losses"], rel=BF16_EPS)
    assert narrow["losses"][0] != wide["losses"][0], "the products are in bf16"
    assert narrow["saved"] == narrow["buffers"] == {torch.float32}
    assert mean_distance(narrow, wide) < LR / 10  # tp rounds partial sums before it adds them


@pytest.mark.parametrize(
    ("engine", "axes"), [("deepspeed", {"tp": 2}), ("fsdp", {"pp": 2, "ep": 1}), ("deepspeed", {"cp": 2})], ids=str
)
def test_an_encoder_decoder_in_bf16_stays_near_fp32(run_values, engine, axes):
    model = load_preset("switch-encdec-test").to_dict() | {"vocab_size": 1024}
    model["moe"]["router"]["capacity_factor"] = None  # near fp32, another token would be dropped
    run_values |= {"model": model, "data": run_values["data"] | {"encoder_len": 20}, "balance": {"z_coefficient": 0.01}}
    wide, narrow = (
        run_distributed(three_steps, run_values, engine, 3, compute, axes)[0] for compute in ("fp32", "bf16")
    )
    assert narrow["losses"] == pytest.approx(wide["losses"], rel=BF16_EPS)
    assert narrow["losses"][0] != wide["losses"][0], "the products are in bf16"
    assert narrow["saved"] == {torch.float32}
    assert mean_distance(narrow, wide) < LR / 10


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_stages_at_which_deepspeed_would_sum_gradients_in_bf16_are_refused(run_values, zero_stage):
    with pytest.raises(PlanError) as caught:
        engine_name(recipe_of(run_values, "deepspeed", zero_stage, "bf16"))
    assert str(caught.value) == (
        f"parallel.zero_stage: {zero_stage}; DeepSpeed keeps fp32 gradients of a bf16 model at stages 2 and 3 only; set "
        f"one of them"
    )


@pytest.mark.parametrize(("engine", "zero_stage"), ENGINES)
def test_a_resumed_bf16_run_equals_the_unbroken_one_bit_for_bit(run_values, tmp_path, engine, zero_stage):
    run_values["train"]["steps"] = 4
    run_values["checkpoint"]["every"] = 2
    values = recipe_of(run_values, engine, zero_stage, "bf16").to_dict()
    unbroken = Path(on_ranks(values))
    resumed = Path(on_ranks(moved(values, tmp_path, keep_step=2)))
    assert_same_bits(state(unbroken, 4), state(resumed, 4))
    assert losses(unbroken) == losses(resumed)
