"""The twin keeps every choice of a recipe; the table says which layouts it can have."""

import math

import pytest

from moe_zoo.certify.factors import cases
from moe_zoo.certify.truth import find_truth
from moe_zoo.certify.twin import changed, tiny_twin, what_was_shrunk
from moe_zoo.spec.errors import RecipeError
from moe_zoo.spec.recipe_file import load_recipe

SWITCH = "recipes/tiny/switch_lm.yaml"


def found(overrides, names, ranks: int = 4):
    recipe = load_recipe(SWITCH, overrides)
    return cases(recipe, tiny_twin(recipe, ranks), ranks, names)


def test_the_twin_keeps_every_choice_and_is_small():
    recipe = load_recipe(SWITCH, ["model.moe.router.top_k=3", "model.moe.first_layer=2", "model.norm=layernorm"])
    twin = tiny_twin(recipe, 4)
    router = recipe.model.moe.router
    same = ("top_k", "score", "normalize", "scale", "selection_bias", "jitter", "capacity_factor")
    assert all(getattr(twin.model.moe.router, name) == getattr(router, name) for name in same)
    assert (twin.model.norm, twin.balance.scope) == (recipe.model.norm, recipe.balance.scope)
    assert twin.model.num_experts == 8 and twin.model.sparse_layers == [1, 3]
    assert twin.parallel.ep == 1 and twin.expect is None and twin.precision.compute == "fp32"
    assert what_was_shrunk(recipe, twin)["model.d_model"] == (128, 16)


def test_the_twin_of_an_encoder_decoder_is_one():
    recipe = load_recipe("recipes/tiny/switch_encdec.yaml", ["model.encoder.every=3", "model.encoder.extra_ffn=true"])
    twin = tiny_twin(recipe, 4)
    assert (twin.model.num_layers, twin.model.encoder.num_layers, twin.model.sparse_layers) == (4, 2, [1, 3])
    assert (twin.data.seq_len, twin.data.encoder_len) == (16, 8)
    assert twin.model.encoder.extra_ffn and twin.model.moe.router.capacity_factor == 2.0
    found = cases(recipe, twin, 4, None)
    assert all(case.recipe is not None for case in found if case.factor != "zero" or "zero 3" in case.label)


@pytest.mark.parametrize("overrides", [[], ["model.moe=null"], ["model.preset=topk-lm-test", "balance.method=bias"]])
def test_no_choice_of_the_twin_hangs_on_rounding(overrides):
    twin = tiny_twin(load_recipe(SWITCH, overrides), 4)
    _, records, rounding = find_truth(twin, {1})
    assert records[1][0]["norm"][""] > twin.optim.clip
    assert all(found.error < 1e-4 for found in rounding.values()) and not math.isnan(rounding["loss"].error)
    if twin.model.moe:
        assert all(counts[-1] == 0 for counts in records[1][0]["counts"].values()), "the last expert is idle at first"


def test_what_a_recipe_cannot_have_is_told():
    (ep, *_), (etp,) = (found(["model.moe=null"], [name]) for name in ("ep", "etp"))
    assert ep.recipe is None and ep.reason == "parallel.ep: 2; the model has no experts to spread"
    assert etp.recipe is None and "no experts" in etp.reason
    stages = found(["parallel.engine=fsdp"], ["zero"])
    assert [case.recipe is None for case in stages] == [True, True, False, False]


def test_the_recipes_own_layout_is_scaled_to_the_ranks():
    own = [
        "parallel.pp=8",
        "parallel.schedule=DualPipeV",
        "parallel.ep=16",
        "parallel.recompute=1",
        "train.micro_batches=8",
    ]
    (case,) = found(own, ["combination"])
    assert case.label == "schedule DualPipeV, zero 3, recompute 1, gather step, pp 2, ep 2, passes 4"
    assert (case.recipe.parallel.pp, case.recipe.parallel.ep, case.recipe.train.micro_batches) == (2, 2, 4)


def test_what_does_not_fit_on_the_ranks_is_told():
    (case,) = found(["parallel.pp=2", "parallel.tp=2", "train.micro_batches=4", "parallel.cp=2"], ["combination"])
    assert case.label.endswith(", without cp (too few ranks)") and case.recipe.parallel.cp == 1


def test_a_resumed_run_goes_on_under_the_other_engine():
    (case,) = found(["parallel.ep=2"], ["resume"])
    assert (case.recipe.parallel.ep, case.elsewhere.parallel.ep) == (2, 1)
    assert {case.recipe.parallel.engine, case.elsewhere.parallel.engine} == {"deepspeed", "fsdp"}


def test_an_unknown_factor_is_refused_with_a_suggestion():
    with pytest.raises(RecipeError, match=r"^--factors: 'epp'; no such factor; did you mean 'pp'\?$|'ep'"):
        found([], ["epp"])


def test_a_change_of_what_is_not_there_is_left_out():
    recipe = tiny_twin(load_recipe(SWITCH, ["model.moe=null"]), 2)
    assert changed(recipe, {"model.moe.router.top_k": 2}) == recipe
