"""Any engine, stage and layout takes the steps that one process takes."""

import pytest

from tests.law import check, make_recipe

ENGINES = [("deepspeed", 0), ("deepspeed", 3), ("fsdp", 2), ("fsdp", 3)]


@pytest.mark.parametrize(("engine", "zero_stage"), ENGINES)
def test_two_ranks_with_experts_spread_take_the_steps_of_one_process(engine, zero_stage):
    check(make_recipe(parallel__engine=engine, parallel__zero_stage=zero_stage, parallel__ep=2), world_size=2)


@pytest.mark.parametrize(("engine", "zero_stage"), ENGINES)
def test_four_ranks_that_share_experts_in_pairs_take_the_steps_of_one_process(engine, zero_stage):
    check(make_recipe(parallel__engine=engine, parallel__zero_stage=zero_stage, parallel__ep=2), world_size=4)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_weights_gathered_once_for_a_step_change_nothing(engine):
    check(make_recipe(parallel__engine=engine, parallel__gather="step", parallel__ep=2), world_size=4)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_gradients_sharded_after_each_backward_add_up(engine):
    check(make_recipe(parallel__engine=engine, parallel__reduce="micro_batch", parallel__ep=2), world_size=4)


@pytest.mark.parametrize("what", [1, "selective"])
@pytest.mark.parametrize(("engine", "zero_stage"), ENGINES)
def test_what_runs_twice_changes_nothing(engine, zero_stage, what):
    recipe = make_recipe(
        parallel__engine=engine, parallel__zero_stage=zero_stage, parallel__recompute=what, parallel__ep=2
    )
    check(recipe, world_size=2)


@pytest.mark.parametrize("gather", ["layer", "step"])
def test_weights_in_host_memory_too_take_the_same_steps(gather):
    recipe = make_recipe(parallel__engine="deepspeed", parallel__offload="all", parallel__gather=gather, parallel__ep=2)
    check(recipe, world_size=2)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_an_optimizer_in_host_memory_takes_the_same_steps(zero_stage):
    recipe = make_recipe(
        parallel__engine="deepspeed", parallel__zero_stage=zero_stage, parallel__offload="optimizer", parallel__ep=2
    )
    check(recipe, world_size=4)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_ranks_whose_experts_get_no_token_do_not_hang(engine):
    recipe = make_recipe(parallel__engine=engine, parallel__ep=4, model__moe__router={"num_experts": 8, "top_k": 2})
    check(recipe, world_size=4)  # ranks 2 and 3 hold experts 4 to 7


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_the_middle_zero_stages_too(zero_stage):
    check(make_recipe(parallel__engine="deepspeed", parallel__zero_stage=zero_stage, parallel__ep=2), world_size=4)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("scope", ["sequence", "global_batch"])
def test_the_scope_of_balance_is_exact_whatever_the_engine(engine, scope):
    check(make_recipe(parallel__engine=engine, balance__scope=scope), world_size=2)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_bias_balancing_moves_the_same_way_everywhere(engine):
    recipe = make_recipe(
        parallel__engine=engine,
        model__moe__router={
            "num_experts": 6,
            "top_k": 2,
            "score": "sigmoid",
            "normalize": True,
            "selection_bias": True,
        },
        balance={"method": "bias", "bias_update_rate": 0.05},
    )
    check(recipe, world_size=2, starved=False)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_switch_with_capacity_drops_the_same_tokens_in_every_layout(engine):
    recipe = make_recipe(
        parallel__engine=engine,
        model__moe={
            "router": {"num_experts": 6, "top_k": 1, "capacity_factor": 1.0, "jitter": 0.01},
            "experts": {"d_ff": 12, "activation": "relu", "gated": False},
            "every": 1,
        },
    )
    check(recipe, world_size=2)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_static_capacity_takes_the_steps_of_one_process(engine):
    recipe = make_recipe(
        parallel__engine=engine,
        parallel__ep=2,
        parallel__dispatch="padded",
        model__moe__router={"num_experts": 6, "top_k": 2, "capacity_factor": 1.0, "jitter": 0.01},
    )
    check(recipe, world_size=2)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_tokens_that_choose_within_groups_take_the_steps_of_one_process(engine):
    router = {"num_experts": 6, "top_k": 2, "num_groups": 3, "groups_per_token": 1, "group_score": "top2"}
    recipe = make_recipe(parallel__engine=engine, parallel__ep=2, model__moe__router=router)
    check(recipe, world_size=2)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("dispatch", ["exact", "padded"])
def test_experts_that_choose_take_the_steps_of_one_process(engine, dispatch):
    recipe = make_recipe(
        parallel__engine=engine,
        parallel__ep=2,
        parallel__dispatch=dispatch,
        model__moe__router={"num_experts": 6, "top_k": 2, "choice": "expert", "jitter": 0.1},  # jitter: no equal tokens
        balance={"method": "none", "z_coefficient": 0.01},
    )
    check(recipe, world_size=2, starved=False)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_tied_embeddings_and_a_dense_layer(engine):
    recipe = make_recipe(
        parallel__engine=engine, model__tie_embeddings=True, model__norm="layernorm", model__moe__first_layer=1
    )
    assert recipe.model.sparse_layers == [1]
    check(recipe, world_size=2)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("scope", ["micro_batch", "global_batch"])
def test_a_model_without_experts_takes_the_same_steps(engine, scope):
    check(make_recipe(parallel__engine=engine, model__moe=None, balance__scope=scope), world_size=2, starved=False)


@pytest.mark.parametrize(("engine", "zero_stage"), ENGINES)
def test_one_rank_alone_takes_them_too(engine, zero_stage):
    check(make_recipe(parallel__engine=engine, parallel__zero_stage=zero_stage), world_size=1)


def async_io_is_there() -> bool:
    return pytest.importorskip("deepspeed.ops.op_builder").AsyncIOBuilder().is_compatible(verbose=False)


def test_an_optimizer_on_a_disk_takes_the_same_steps(tmp_path):
    if not async_io_is_there():
        pytest.skip("DeepSpeed's async_io needs a C++ compiler and libaio with its headers")
    for offload in ("optimizer", "all"):
        recipe = make_recipe(
            parallel__engine="deepspeed", parallel__offload=offload, parallel__nvme=str(tmp_path), parallel__ep=2
        )
        check(recipe, world_size=2)
