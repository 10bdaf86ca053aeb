"""A comparison is arithmetic on metrics files."""

import json
from pathlib import Path

import pytest

from moe_zoo.spec.accounting import training_flops_per_token
from moe_zoo.spec.errors import MoeZooError
from moe_zoo.spec.recipe_file import load_recipe
from moe_zoo.train.compare import Contender, check_finished, check_same_tokens, compare, first_difference, summary

ROOT = Path(__file__).parents[3]


@pytest.fixture
def contender(tmp_path):
    files = []
    for seed, loss in enumerate((3.0, 3.2, 3.4)):
        file = tmp_path / f"{seed}.jsonl"
        rows = [{"step": 1, "train/tokens_per_s": 10.0}, {"step": 2, "train/tokens_per_s": 30.0, "valid/loss": loss}]
        rows[1] |= {"valid/bits_per_byte": loss / 2, "train/loss": loss}
        file.write_text("\n".join(map(json.dumps, rows)))
        files.append(file)
    return Contender(load_recipe(ROOT / "recipes/tiny/switch_vs_dense.yaml"), files)


def test_a_summary_holds_mean_and_deviation_over_seeds(contender):
    row = summary(contender)
    assert row["valid_loss"] == pytest.approx(3.2) and row["valid_loss_stdev"] == pytest.approx(0.2)
    assert row["bits_per_byte"] == pytest.approx(1.6) and row["tokens_per_s"] == 20.0
    assert row["tokens"] == 800 * 16 * 256


def test_recipes_that_read_different_amounts_of_text_are_not_compared():
    switch, other = (load_recipe(ROOT / f"recipes/tiny/{name}.yaml") for name in ("switch_vs_dense", "switch_lm"))
    check_same_tokens([switch, switch])
    with pytest.raises(MoeZooError) as caught:
        check_same_tokens([switch, other])
    assert str(caught.value) == (
        "compare: switch-lm-tiny reads 1,433,600 tokens of data/stdlib-1k, switch 3,276,800 of data/stdlib-1k; losses "
        "are compared at equal tokens; let one extend the other"
    )


def test_a_kept_run_of_another_recipe_does_not_count(tmp_path):
    path, other = ROOT / "recipes/tiny/switch_vs_dense.yaml", ["optim.lr=1e-4"]
    asked = [f"log.folder={tmp_path}", "data.path=/nowhere"]
    folder = tmp_path / "switch-seed0"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(load_recipe(path, [*asked, *other, "name=switch-seed0"]).to_yaml())
    with pytest.raises(MoeZooError) as caught:
        compare([path], 1, 1, asked, tmp_path / "c.png")
    assert str(caught.value) == (
        f"compare: {folder}; was trained with another optim.lr; a comparison takes what is trained already; delete that "
        f"folder, or set log.folder to another"
    )


def test_a_run_that_was_stopped_ends_the_comparison_and_does_not_count(contender):
    with pytest.raises(MoeZooError) as caught:
        check_finished(contender.files[0], contender.recipe)
    assert str(caught.value) == (
        f"compare: {contender.files[0].parent.name} stands at step 2 of 800; it was stopped; run the same command again "
        f"to go on"
    )
    short = load_recipe(ROOT / "recipes/tiny/switch_vs_dense.yaml", ["train.steps=2"])
    check_finished(contender.files[0], short)


@pytest.mark.parametrize(
    ("other", "key"),
    [({"a": {"b": 1}, "c": [1]}, None), ({"a": {"b": 2}, "c": [1]}, "a.b"), ({"a": None, "c": [1]}, "a"), ({}, "a")],
)
def test_the_first_difference_is_named(other, key):
    assert first_difference({"a": {"b": 1}, "c": [1]}, other) == key


def test_the_dense_twin_costs_the_same_flops_per_token():
    sparse, dense = (load_recipe(ROOT / f"recipes/tiny/{name}.yaml") for name in ("switch_vs_dense", "dense_twin"))
    flops = [training_flops_per_token(recipe.model, recipe.data.seq_len) for recipe in (sparse, dense)]
    assert 1.0 <= flops[0] / flops[1] < 1.005  # the router
    assert (sparse.train, sparse.optim, sparse.data) == (dense.train, dense.optim, dense.data)
