"""Every recipe that ships is planned here: it parses, fits one and two ranks, and its model is accounted for."""

from pathlib import Path

import pytest

from moe_zoo.spec.accounting import num_active_parameters, num_parameters, training_flops_per_token
from moe_zoo.spec.layout import resolve_layout
from moe_zoo.spec.recipe import Recipe
from moe_zoo.spec.recipe_file import load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "launch")


def names(paths) -> list[str]:
    return [str(path.relative_to(ROOT / "recipes")) for path in paths]


def test_there_are_recipes():
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=names(RECIPES))
def test_a_recipe_fits_its_ranks_and_its_model_is_accounted_for(path):
    recipe = load_recipe(path)
    for world in [recipe.expect.world] if recipe.expect else [1, 2]:
        layout = resolve_layout(recipe, world, ranks_per_node=min(world, 8))
        assert layout.dp == layout.edp * layout.ep == world
    total, active = num_parameters(recipe.model), num_active_parameters(recipe.model)
    assert 0 < active <= total and (active < total) == bool(recipe.model.num_experts)
    data = recipe.data
    assert (
        training_flops_per_token(recipe.model, data.seq_len, data.encoder_len or 0) > 6 * active / 2
    )  # embeddings cost no product
    assert Recipe.from_dict(recipe.to_dict()) == recipe


@pytest.mark.parametrize("path", RECIPES, ids=names(RECIPES))
def test_a_recipe_of_ours_names_a_tokenizer_that_ships_and_fits_the_model(path):
    from data_pipelines import load_tokenizer

    recipe = load_recipe(path)
    assert load_tokenizer(ROOT / recipe.data.tokenizer).vocab_size <= recipe.model.vocab_size
