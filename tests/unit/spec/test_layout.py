"""A layout fits its world, or says which number to change to one that does."""

import pytest

from moe_zoo.spec.errors import PlanError
from moe_zoo.spec.layout import ParallelLayout, resolve_layout
from moe_zoo.spec.presets import preset_values
from moe_zoo.spec.recipe import Recipe


def recipe(*, ep: int | str = "auto", rows: int = 24, micro_batches: int = 1, **changes) -> Recipe:
    """A recipe of 4 experts."""
    values = {
        "name": "layout",
        "model": preset_values("switch-lm-test"),
        "data": {"path": "data", "tokenizer": "tokenizer", "seq_len": 8},
        "train": {"steps": 4, "global_batch": rows, "micro_batches": micro_batches},
        "optim": {"lr": 1e-3},
        "parallel": {"ep": ep},
    }
    return Recipe.from_dict(values | changes)


@pytest.mark.parametrize(
    ("world", "ranks_per_node", "ep"),
    [(1, 1, 1), (2, 2, 2), (4, 4, 4), (8, 8, 4), (6, 6, 2), (3, 3, 1), (8, 2, 2), (12, 8, 4)],
)
def test_auto_ep_is_the_largest_divisor_of_the_experts_that_divides_a_node(world, ranks_per_node, ep):
    layout = resolve_layout(recipe(), world, ranks_per_node)
    assert layout == ParallelLayout(world=world, ep=ep)
    assert (layout.dp, layout.edp) == (world, world // ep)


def test_auto_ep_of_a_dense_model_is_one():
    dense = recipe(model=preset_values("switch-lm-test") | {"moe": None})
    assert resolve_layout(dense, 4, 4).ep == 1


@pytest.mark.parametrize(
    ("asked", "world", "text"),
    [
        ({"ep": 3}, 4, "parallel.ep: 3; must divide the 4 ranks launched; try 2, or auto"),
        ({"ep": 3}, 6, "parallel.ep: 3; must divide the model's 4 experts; try 2, or auto"),
        ({"ep": 2}, 1, "parallel.ep: 2; must divide the 1 rank launched; try 1, or auto"),
        (
            {"rows": 8, "micro_batches": 2},
            3,
            "train.global_batch: 8; must be a multiple of train.micro_batches * ranks = 2 * 3 = 6; try 12",
        ),
        (
            {"expect": {"world": 2}},
            1,
            "expect.world: 2; the recipe was launched on 1 rank; launch 2, or set expect=null",
        ),
        (
            {"parallel": {"dispatch": "hierarchical"}},
            2,
            "parallel.dispatch: hierarchical; wants parallel.ep * parallel.etp = 2 to fill two or more nodes of 2 ranks, "
            "experts whole in a node and equally many in each; try exact, or set parallel.ep",
        ),
        (
            {"ep": 2, "model": preset_values("switch-lm-test") | {"moe": None}},
            2,
            "parallel.ep: 2; the model has no experts to spread; set parallel.ep to 1",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_in_one_line(asked, world, text):
    with pytest.raises(PlanError) as refused:
        resolve_layout(recipe(**asked), world, world)
    assert str(refused.value) == text


@pytest.mark.parametrize("world", range(1, 13))
@pytest.mark.parametrize("ep", range(1, 6))
def test_the_number_an_error_proposes_works(world, ep):
    try:
        layout = resolve_layout(recipe(ep=ep, rows=world), world, world)
        assert layout.ep * layout.edp == world
    except PlanError as refused:
        proposed = int(str(refused).split("try ")[1].split(",")[0])
        assert resolve_layout(recipe(ep=proposed, rows=world), world, world).ep == proposed


def piped(
    pp: int, schedule: str = "1F1B", layers: int = 8, micro_batches: int = 8, rows: int = 48, **changes
) -> Recipe:
    """A recipe for ``pp`` pipeline ranks."""
    model = preset_values("switch-lm-test") | {"num_layers": layers} | changes
    whole = recipe(rows=rows, micro_batches=micro_batches, model=model).to_dict()
    return Recipe.from_dict(whole | {"parallel": {"pp": pp, "schedule": schedule}})


def test_a_pipeline_takes_its_ranks_from_the_data_parallel_ones():
    layout = resolve_layout(piped(2, rows=64), 8, 8)
    assert (layout.pp, layout.dp, layout.ep, layout.edp, layout.num_stages) == (2, 4, 4, 1, 2)
    assert [layout.stages_of(rank) for rank in range(2)] == [[0], [1]]


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [("Interleaved1F1B", [[0, 2], [1, 3]]), ("ZBVZeroBubble", [[0, 3], [1, 2]]), ("DualPipeV", [[0, 3], [1, 2]])],
)
def test_two_stages_per_rank_lie_in_a_loop_or_in_a_v(schedule, stages):
    layout = resolve_layout(piped(2, schedule), 2, 2)
    assert [layout.stages_of(rank) for rank in range(2)] == stages


@pytest.mark.parametrize(
    ("asked", "world", "text"),
    [
        ({"pp": 3}, 4, "parallel.pp: 3; must divide the 4 ranks launched; try 2"),
        (
            {"pp": 4, "schedule": "DualPipeV", "layers": 6},
            4,
            "parallel.pp: 4; schedule DualPipeV cuts the model in 8 stages, it has 6 layers; try 3",
        ),
        (
            {"pp": 2, "micro_batches": 3, "rows": 6},
            2,
            "train.micro_batches: 3; schedule 1F1B of 2 pipeline ranks wants a multiple of 2, at least 2; try 4",
        ),
        (
            {"pp": 2, "schedule": "ZBVZeroBubble", "micro_batches": 2},
            2,
            "train.micro_batches: 2; schedule ZBVZeroBubble of 2 pipeline ranks wants a multiple of 2, at least 4; try 4",
        ),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused_with_one_that_can(asked, world, text):
    with pytest.raises(PlanError) as caught:
        resolve_layout(piped(**asked), world, world)
    assert str(caught.value) == text


def test_gpipe_takes_any_number_of_micro_batches():
    assert resolve_layout(piped(2, "GPipe", micro_batches=1), 2, 2).num_stages == 2


def test_ep_must_fit_into_a_pipeline_rank():
    values = piped(2).to_dict()
    values["parallel"]["ep"] = 4
    with pytest.raises(
        PlanError, match=r"^parallel\.ep: 4; must divide the 2 ranks of each of the 2 pipeline ranks; try 2"
    ):
        resolve_layout(Recipe.from_dict(values), 4, 4)


def shared(rows: int = 48, seq_len: int = 16, world: int = 8, **parallel) -> ParallelLayout:
    """A layout of the test preset: 4 heads, 2 of keys, d_ff 64, vocabulary 64."""
    values = recipe(rows=rows).to_dict()
    values["data"]["seq_len"] = seq_len
    values["model"] |= {"vocab_size": 64, "num_layers": 3}
    values["model"]["attention"] |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    values["model"]["moe"]["experts"]["d_ff"] = values["model"]["feed_forward"]["d_ff"] = 12
    return resolve_layout(Recipe.from_dict(values | {"parallel": parallel}), world, world)


def test_rows_are_dealt_to_what_tensor_and_context_leave():
    layout = shared(tp=2, cp=2, ep=4, etp=2)
    assert (layout.dp, layout.edp, layout.kv_parts, layout.pod_size) == (2, 1, 2, 8)
    assert str(layout) == "dp 2 x cp 2 x tp 2, edp 1 x ep 4 x etp 2"


def test_auto_ep_leaves_room_for_the_slices_of_an_expert_and_stays_in_a_pod():
    assert shared(etp=2).ep == 4 and shared(etp=4).ep == 2 and shared(replicate=4).ep == 2


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"tp": 3}, "parallel.tp: 3; must divide model.attention.num_heads = 4; try 2"),
        ({"tp": 8}, "parallel.tp: 8; must divide model.attention.num_heads = 4; try 4"),
        ({"tp": 2, "world": 3}, "parallel.tp: 2; must divide the 3 ranks launched; try 1"),
        ({"tp": 2, "cp": 8}, "parallel.cp: 8; 4 * 8 = 32 must divide data.seq_len = 16; try 4"),
        ({"tp": 2, "cp": 2, "world": 2}, "parallel.cp: 2; must divide the 1 rank left of the 2 launched; try 1"),
        ({"cp": 8, "context": "ulysses"}, "parallel.cp: 8; must divide model.attention.num_heads = 4; try 4"),
        ({"replicate": 3}, "parallel.replicate: 3; must divide the 8 ranks launched; try 2"),
        ({"etp": 8}, "parallel.etp: 8; must divide model.moe.experts.d_ff = 12; try 4"),
        (
            {"ep": 4, "etp": 4},
            "parallel.etp: 4; parallel.ep * parallel.etp = 16 must divide the 8 ranks launched; try 2",
        ),
        ({"ep": 4, "replicate": 4}, "parallel.ep: 4; must divide the 2 ranks of each pod; try 2, or auto"),
        ({"seq_len": 10, "cp": 2}, "parallel.cp: 2; 2 * 2 = 4 must divide data.seq_len = 10; try 1"),
    ],
)
def test_a_degree_that_cuts_unevenly_is_refused_with_the_nearest_that_does_not(asked, text):
    with pytest.raises(PlanError) as refused:
        shared(**asked)
    assert str(refused.value) == text


@pytest.mark.parametrize("factor", ["tp", "cp", "replicate", "etp", "ep"])
@pytest.mark.parametrize("size", range(2, 13))
@pytest.mark.parametrize("world", [1, 2, 6, 8, 12])
def test_the_degree_that_an_error_proposes_works(factor, size, world):
    asked = {factor: size}
    try:
        shared(world=world, **asked)
    except PlanError as refused:
        proposed = int(str(refused).split("try ")[1].split(",")[0])
        assert proposed < size
        shared(world=world, **{factor: proposed})


@pytest.mark.parametrize(("seq_len", "tp"), [(15, 1), (18, 2)])
def test_a_row_too_odd_for_any_context_parallelism_is_told_so(seq_len, tp):
    data = {"path": "data", "tokenizer": "tokenizer", "seq_len": seq_len}
    asked = recipe(data=data, parallel={"cp": 2, "tp": tp})
    with pytest.raises(PlanError, match=rf"parallel.cp: 2; .* must divide data.seq_len = {seq_len}; try 1$"):
        resolve_layout(asked, 4, 4)
