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
