"""A pipeline under any schedule and engine takes the steps of one process."""

import pytest

from tests.law import check, make_recipe

SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def pipeline_recipe(engine: str, schedule: str, zero_stage: int = 3, **changes):
    base = {
        "parallel__engine": engine,
        "parallel__zero_stage": zero_stage,
        "parallel__pp": 2,
        "parallel__ep": 2,
        "parallel__schedule": schedule,
        "model__num_layers": 4,
        "train__micro_batches": 4,
    }
    return make_recipe(**base | changes)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_with_experts_spread_in_each_stage(engine, schedule):
    check(pipeline_recipe(engine, schedule), world_size=4)


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_the_other_zero_stages(zero_stage):
    check(pipeline_recipe("deepspeed", "1F1B", zero_stage), world_size=4)


def test_an_optimizer_in_host_memory_takes_the_same_steps():
    check(pipeline_recipe("deepspeed", "1F1B", parallel__offload="optimizer"), world_size=4)


def test_weights_gathered_once_allow_a_split_backward_under_zero_3():
    check(pipeline_recipe("deepspeed", "ZBVZeroBubble", parallel__gather="step"), world_size=4)


@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV"])
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_blocks_that_run_twice_change_nothing(engine, schedule):
    check(pipeline_recipe(engine, schedule, parallel__recompute=2), world_size=4)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("scope", ["sequence", "global_batch"])
def test_the_scope_of_balance_crosses_stages(engine, scope):
    check(pipeline_recipe(engine, "1F1B", balance__scope=scope), world_size=4)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_a_stage_without_experts_and_one_with_bias_balancing(engine):
    recipe = pipeline_recipe(
        engine,
        "1F1B",
        model__moe__router={
            "num_experts": 6,
            "top_k": 2,
            "score": "sigmoid",
            "normalize": True,
            "selection_bias": True,
        },
        model__moe__first_layer=3,
        balance={"method": "bias", "bias_update_rate": 0.05, "z_coefficient": 0.01},
    )
    check(recipe, world_size=4, starved=False)


@pytest.mark.parametrize(
    ("engine", "zero_stage", "schedule"),
    [
        ("deepspeed", 0, "1F1B"),
        ("deepspeed", 1, "1F1B"),
        ("deepspeed", 2, "DualPipeV"),
        ("deepspeed", 3, "Interleaved1F1B"),
        ("deepspeed", 3, "ZBVZeroBubble"),
        ("fsdp", 3, "1F1B"),
        ("fsdp", 3, "DualPipeV"),
    ],
)
def test_a_vocabulary_tied_across_the_pipeline(engine, zero_stage, schedule):
    check(pipeline_recipe(engine, schedule, zero_stage, model__tie_embeddings=True), world_size=4)


def test_a_tied_vocabulary_in_two_pods_with_its_optimizer_in_host_memory():
    changes = {"model__tie_embeddings": True, "parallel__offload": "optimizer", "parallel__replicate": 2}
    check(pipeline_recipe("deepspeed", "1F1B", parallel__ep=1, **changes), world_size=4)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_gradients_sharded_after_each_backward_add_up(engine, schedule):
    check(pipeline_recipe(engine, schedule, parallel__reduce="micro_batch"), world_size=4)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_experts_that_choose_and_static_capacity(engine):
    recipe = pipeline_recipe(
        engine,
        "1F1B",
        parallel__dispatch="padded",
        model__moe__router={"num_experts": 6, "top_k": 2, "choice": "expert", "jitter": 0.1},
        balance={"method": "none", "z_coefficient": 0.01},
    )
    check(recipe, world_size=4, starved=False)
