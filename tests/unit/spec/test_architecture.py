"""An architecture is refused where its numbers cannot be, and survives the trip through plain values."""

import json
from dataclasses import replace

import pytest

from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.errors import RecipeError
from moe_zoo.spec.presets import load_preset, preset, preset_names

SWITCH = load_preset("switch-lm-test")


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_survives_json_and_names_its_source(name):
    architecture = load_preset(name)
    assert Architecture.from_dict(json.loads(json.dumps(architecture.to_dict()))) == architecture
    assert len(preset(name).source) > 5 and preset(name).family


def test_the_test_presets_make_opposite_choices():
    other = load_preset("topk-lm-test")
    assert SWITCH.moe.router.top_k == 1 and other.moe.router.top_k == 2
    assert SWITCH.moe.shared is None and other.moe.shared is not None
    assert not SWITCH.moe.router.selection_bias and other.moe.router.selection_bias
    assert other.attention.num_kv_heads == 1 and other.attention.qk_norm


def test_sparse_layers_start_at_first_layer_and_come_every_so_many():
    moe = replace(SWITCH.moe, first_layer=1, every=2)
    assert replace(SWITCH, num_layers=6, moe=moe).sparse_layers == [1, 3, 5]
    assert replace(SWITCH, moe=None).sparse_layers == []
    assert replace(SWITCH, moe=None).num_experts == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"d_mdoel": 3}, "model.d_mdoel: unknown key; did you mean 'd_model'?"),
        ({"d_model": 0}, "model d_model: 0; must be positive; raise it"),
        ({"norm": "rms"}, "model norm: 'rms'; did you mean 'rmsnorm'?"),
        (
            {"attention": {"num_heads": 4, "num_kv_heads": 3, "head_dim": 8}},
            "attention.num_kv_heads: 3; must divide num_heads = 4; 4 keeps every head its own keys",
        ),
        (
            {"attention": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 7}},
            "attention.head_dim: 7; rotary pairs need an even number; change it",
        ),
        ({"feed_forward": {"activation": "relu"}}, "model.feed_forward.d_ff: missing; every model needs it; add it"),
    ],
)
def test_impossible_architectures_are_refused_in_one_line(change, text):
    with pytest.raises(RecipeError) as refused:
        Architecture.from_dict(SWITCH.to_dict() | change)
    assert str(refused.value) == text


@pytest.mark.parametrize(
    ("router", "text"),
    [
        ({"top_k": 5}, "router.top_k: 5; a token cannot choose more than num_experts = 4; lower it"),
        ({"jitter": 1.0}, "router.jitter: 1.0; must be at least 0 and below 1; Switch uses 0.01"),
        ({"capacity_factor": 0}, "router.capacity_factor: 0; must be positive; null never drops a token"),
        ({"num_groups": 3}, "router.num_groups: 3; must divide num_experts = 4; try 1"),
        ({"groups_per_token": 2}, "router.groups_per_token: 2; there are num_groups = 1; lower it"),
        (
            {"num_groups": 4, "groups_per_token": 2, "top_k": 3},
            "router.top_k: 3; the groups_per_token = 2 groups of a token hold 2 experts; lower it, or raise "
            "groups_per_token",
        ),
        ({"group_score": "top3"}, "model group_score: 'top3'; did you mean 'top2'?"),
        ({"choice": "exprt"}, "model choice: 'exprt'; did you mean 'expert'?"),
        (
            {"choice": "expert", "selection_bias": True},
            "router.selection_bias: true; says how tokens choose, here experts do; set it to false, or choice to token",
        ),
        (
            {"choice": "expert", "num_groups": 2},
            "router.num_groups: 2; says how tokens choose, here experts do; set it to 1, or choice to token",
        ),
        ({"zero_experts": -1}, "router.zero_experts: -1; must be at least 0; 0 has none"),
        *(
            (
                {"zero_experts": 2, "top_k": 1} | unlike,
                "router.zero_experts: 2; are built where tokens choose among all experts by softmax or sigmoid and weights "
                "scale outputs; set it to 0, or drop choice, num_groups, scales_input or sparsemixer",
            )
            for unlike in ({"choice": "expert"}, {"num_groups": 2}, {"scales_input": True}, {"score": "sparsemixer"})
        ),
    ],
)
def test_impossible_routers_are_refused_in_one_line(router, text):
    with pytest.raises(RecipeError) as refused:
        replace(SWITCH.moe.router, **router)
    assert str(refused.value) == text


def test_a_model_whose_first_sparse_layer_is_past_its_end_is_refused():
    with pytest.raises(RecipeError, match=r"^moe.first_layer: 2; the model has layers 0 to 1; lower it"):
        replace(SWITCH, moe=replace(SWITCH.moe, first_layer=2))


@pytest.mark.parametrize("unlike", [{"moe": None}, {"residual_scale": 0.5}, {"local_layers": (0,)}, {"first_layer": 1}])
def test_a_shortcut_is_refused_where_it_is_not_built(unlike):
    if "first_layer" in unlike:
        unlike = {"moe": replace(SWITCH.moe, **unlike)}
    if "local_layers" in unlike:
        unlike |= {"local_attention": SWITCH.attention}
    with pytest.raises(
        RecipeError, match=r"^model.shortcut: true; is built where every block has experts, one kind of"
    ):
        replace(SWITCH, shortcut=True, **unlike)


def test_a_token_may_choose_more_than_have_weights_where_others_are_scored():
    assert replace(SWITCH.moe.router, top_k=5, zero_experts=3).num_scored == 7
