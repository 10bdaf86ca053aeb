"""Tensor, context, expert-tensor and hybrid layouts take the steps of one process, alone and together."""

import pytest

from tests.law import check, make_recipe

ENGINES = [("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3), ("fsdp", 2), ("fsdp", 3)]


def split_recipe(engine: str, zero_stage: int = 3, **changes):
    """Sizes that four ranks can share, some of them only just."""
    base = {
        "parallel__engine": engine,
        "parallel__zero_stage": zero_stage,
        "model__vocab_size": 36,
        "model__attention": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "qk_norm": True},
        "model__moe__first_layer": 1,
        "data__seq_len": 16,
    }
    return make_recipe(**base | changes)


@pytest.mark.parametrize(("engine", "zero_stage"), ENGINES)
def test_two_ranks_that_share_every_matrix(engine, zero_stage):
    check(split_recipe(engine, zero_stage, parallel__tp=2, parallel__ep=2), world_size=2)


@pytest.mark.parametrize("context", ["gather", "ulysses"])
@pytest.mark.parametrize(("engine", "zero_stage"), [("deepspeed", 3), ("fsdp", 3)])
def test_two_ranks_that_share_every_row(engine, zero_stage, context):
    check(split_recipe(engine, zero_stage, parallel__cp=2, parallel__context=context), world_size=2)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize(
    "axes",
    [
        {"tp": 2, "cp": 2, "ep": 2, "etp": 2},  # two parts of two experts' halves, one row for all
        {"tp": 4, "ep": 2},  # two tp ranks hold the same key head
        {"cp": 2, "ep": 4, "context": "ulysses"},
        {"replicate": 2, "ep": 2},
        {"replicate": 2, "tp": 2},
        {"pp": 2, "tp": 2, "ep": 2, "schedule": "Interleaved1F1B"},
        {"pp": 2, "cp": 2, "ep": 2, "schedule": "DualPipeV"},
        {"pp": 2, "replicate": 2},
    ],
    ids=lambda axes: " ".join(f"{name}{value}" for name, value in axes.items()),
)
def test_four_ranks(engine, axes):
    changes = {f"parallel__{name}": value for name, value in axes.items()}
    if axes.get("ep") == 4:
        changes["model__moe__router"] = {"num_experts": 8, "top_k": 2}  # and two ranks without a token
    if "pp" in axes:
        changes |= {"model__num_layers": 4, "train__micro_batches": 4}
    check(split_recipe(engine, **changes), world_size=4)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("scope", ["sequence", "global_batch"])
def test_the_scope_of_balance_when_rows_are_split(engine, scope):
    check(split_recipe(engine, parallel__tp=2, parallel__cp=2, balance__scope=scope), world_size=4)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_capacity_counts_the_whole_row_wherever_its_tokens_are(engine):
    recipe = split_recipe(
        engine,
        parallel__tp=2,
        parallel__cp=2,
        model__moe={
            "router": {"num_experts": 6, "top_k": 2, "capacity_factor": 0.9, "jitter": 0.01},
            "experts": {"d_ff": 12, "activation": "relu", "gated": False},
        },
    )
    check(recipe, world_size=4)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_recompute_and_weights_gathered_once(engine):
    check(split_recipe(engine, parallel__tp=2, parallel__recompute=1, parallel__gather="step"), world_size=2)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_kinds_that_the_same_ranks_hold_are_reduced_together_at_every_micro_batch(engine):
    moe = {"parallel__ep": 2, "model__moe__first_layer": 0}
    check(split_recipe(engine, parallel__tp=2, parallel__reduce="micro_batch", **moe), world_size=2)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_a_tied_vocabulary_is_cut_once(engine):
    check(split_recipe(engine, parallel__tp=2, model__tie_embeddings=True), world_size=2)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("etp", [1, 2])
def test_tokens_that_cross_nodes_once(engine, etp, tmp_path):
    cluster = tmp_path / "pairs.yaml"
    cluster.write_text("name: two nodes of two ranks\nranks_per_domain: 2\n")
    axes = {"parallel__ep": 4 // etp, "parallel__etp": etp, "parallel__tp": 2, "parallel__dispatch": "hierarchical"}
    router = {"num_experts": 8, "top_k": 2}
    check(split_recipe(engine, **axes, model__moe__router=router, cluster=str(cluster)), world_size=4)


@pytest.mark.parametrize("choice", ["token", "expert"])
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_static_capacity_and_experts_that_choose_when_rows_are_split(engine, choice):
    router = {"num_experts": 6, "top_k": 2, "choice": choice, "capacity_factor": 1.0, "jitter": 0.1}
    recipe = split_recipe(
        engine,
        parallel__tp=2,
        parallel__cp=2,
        parallel__ep=2,
        parallel__etp=2,
        parallel__dispatch="padded",
        model__moe__router=router,
        balance__method="none" if choice == "expert" else "aux_loss",
    )
    check(recipe, world_size=4, starved=choice == "token")


SHORTCUT = {
    "model__shortcut": True,
    "model__moe": {
        "router": {"num_experts": 6, "zero_experts": 3, "top_k": 2, "scale": 2.0, "selection_bias": True},
        "experts": {"d_ff": 12},
    },
    "balance__method": "bias",
    "balance__bias_update_rate": 0.05,
}


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize(
    "axes",
    [
        {"tp": 2, "cp": 2, "ep": 2, "etp": 2, "recompute": 1},
        {"tp": 2, "cp": 2, "context": "ulysses", "recompute": "selective"},
        {"pp": 2, "tp": 2, "ep": 2, "dispatch": "padded"},
    ],
    ids=lambda axes: " ".join(f"{name}{value}" for name, value in axes.items()),
)
def test_shortcuts_latent_attention_and_experts_without_weights(engine, axes):
    changes = SHORTCUT | {f"parallel__{name}": value for name, value in axes.items()}
    changes |= {"model__attention": LATENT | {"scales_ranks": True}}
    if "pp" in axes:
        router = SHORTCUT["model__moe"]["router"] | {"capacity_factor": 0.8, "selection_bias": False}
        changes |= {"model__moe": SHORTCUT["model__moe"] | {"router": router}, "balance__method": "aux_loss"}
    check(split_recipe(engine, **changes), world_size=4, starved=False)


LATENT = {"num_heads": 4, "kv_rank": 5, "nope_dim": 3, "rope_dim": 4, "value_dim": 6, "query_rank": 7, "bias": True}


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("axes", [{"tp": 2, "cp": 2, "ep": 2}, {"tp": 2, "cp": 2, "context": "ulysses"}], ids=str)
def test_latent_attention_over_split_heads_and_rows(engine, axes):
    changes = {f"parallel__{name}": value for name, value in axes.items()}
    check(split_recipe(engine, **changes, model__attention=LATENT, parallel__recompute="selective"), world_size=4)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_norms_over_all_heads_biases_and_a_gated_shared_expert_over_split_matrices(engine):
    attention = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "qk_norm": True, "qk_norm_over": "all", "bias": True}
    gated = {"model__moe__shared_gate": True, "model__attention": attention | {"rotary_dim": 2}}
    check(split_recipe(engine, parallel__tp=4, parallel__ep=2, **gated), world_size=4)


EVERYTHING = {
    "train__seed": 4,  # of 3, a token that v is blind to
    "model__attention": {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "bias": True,
        "out_bias": True,
        "sinks": True,
        "temperature": 0.5,
        "temperature_floor": 4,
    },
    "model__local_attention": {
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 6,
        "value_dim": 5,
        "rope_theta": 300.0,
        "window": 5,
        "chunk": 7,
        "qk_unit_norm": True,
        "out_bias": True,
        "sinks": True,
    },
    "model__local_layers": [0],
    "model__moe": {
        "first_layer": 1,
        "router": {"num_experts": 6, "top_k": 2, "normalize": True, "jitter": 0.1, "bias": True},
        "experts": {"d_ff": 12, "activation": "quick_gelu", "bias": True, "limit": 0.5, "up_offset": 1.0},
        "shared": {"d_ff": 8, "bias": True},
    },
    "model__embedding_scale": 1.5,
    "model__residual_scale": 0.7,
    "model__logit_divisor": 0.9,
    "model__head_bias": True,
}


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize(
    "axes",
    [
        {"tp": 2, "cp": 2, "ep": 2, "etp": 2},
        {"tp": 2, "cp": 2, "context": "ulysses"},
        {"tp": 4, "ep": 2, "recompute": "selective"},  # one kind's key heads are shared by ranks, the other's are not
        {"pp": 2, "tp": 2, "ep": 2},
    ],
    ids=lambda axes: " ".join(f"{name}{value}" for name, value in axes.items()),
)
def test_windows_sinks_and_biases_over_split_heads_and_rows(engine, axes):
    changes = {f"parallel__{name}": value for name, value in axes.items()}
    check(split_recipe(engine, **EVERYTHING | changes), world_size=4)
