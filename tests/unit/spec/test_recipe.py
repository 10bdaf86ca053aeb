"""Recipe files: what is read, what is refused, and with which words."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from moe_zoo.spec.errors import RecipeError
from moe_zoo.spec.presets import load_preset
from moe_zoo.spec.recipe import Recipe
from moe_zoo.spec.recipe_file import load_recipe, recipe_schema
from moe_zoo.spec.yaml_text import dump_yaml, parse_yaml

BASE = """
name: base
model: {preset: switch-lm-test}
data: {path: data/x, tokenizer: tokenizers/x, seq_len: 16}
train: {steps: 100, global_batch: 8}
optim: {lr: 3e-4, warmup_steps: 5}
log: {wandb: off}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path / "base.yaml", BASE)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as refused:
        load_recipe(path, list(overrides))
    assert "\n" not in str(refused.value)
    return str(refused.value).replace(f"{path.parent}/", "")


def test_a_preset_is_resolved_and_a_number_may_be_altered(base):
    assert load_recipe(base).model == load_preset("switch-lm-test")
    altered = load_recipe(base, ["model.moe.router.num_experts=8"]).model
    assert altered.num_experts == 8
    assert altered.d_model == load_preset("switch-lm-test").d_model


def test_a_number_in_scientific_notation_is_a_float_everywhere(base):
    assert load_recipe(base).optim.lr == 3e-4
    assert load_recipe(base, ["optim.lr=1e-3"]).optim.lr == 1e-3


def test_overrides_reach_every_kind_of_value(base):
    recipe = load_recipe(
        base, ["train.steps=50", "optim.betas=[0.8, 0.9]", "optim.clip=null", "parallel.ep=2", "expect.world=2"]
    )
    assert recipe.train.steps == 50
    assert recipe.optim.betas == (0.8, 0.9)
    assert recipe.optim.clip is None
    assert recipe.parallel.ep == 2
    assert recipe.expect is not None and recipe.expect.world == 2


def test_a_saved_recipe_loads_back_equal_without_its_parents(base, tmp_path):
    child = write(tmp_path / "child.yaml", "extends: base.yaml\nname: child\ntrain: {sample_prompt: '3e-4: off # no'}")
    recipe = load_recipe(child, ["optim.eps=1e-12", "parallel.ep=auto"])
    (tmp_path / "run").mkdir()
    saved = write(tmp_path / "run" / "recipe.yaml", recipe.to_yaml())
    assert load_recipe(saved) == recipe
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_a_recipe_is_merged_over_those_it_extends(tmp_path, base):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "middle.yaml", "extends: base.yaml\ntrain: {steps: 60, seed: 3}")
    leaf = write(tmp_path / "sub" / "leaf.yaml", "extends: ../middle.yaml\nname: leaf\ntrain: {steps: 70}")
    recipe = load_recipe(leaf)
    assert (recipe.name, recipe.train.steps, recipe.train.seed, recipe.train.global_batch) == ("leaf", 70, 3, 8)


def test_naming_a_preset_starts_the_model_anew(tmp_path, base):
    parent = write(tmp_path / "parent.yaml", "extends: base.yaml\nmodel: {preset: switch-lm-test, d_model: 48}")
    assert load_recipe(parent).model.d_model == 48
    assert load_recipe(parent, ["model.preset=switch-lm-test"]).model == load_preset("switch-lm-test")
    altered = load_recipe(parent, ["model.vocab_size=99", "model.preset=switch-lm-test"]).model
    assert (altered.d_model, altered.vocab_size) == (32, 99)


def test_a_circle_of_parents_is_refused(tmp_path):
    write(tmp_path / "a.yaml", "extends: b.yaml")
    b = write(tmp_path / "b.yaml", "extends: a.yaml")
    assert refusal(b) == "b.yaml: extends: b.yaml -> a.yaml -> b.yaml; a recipe cannot extend itself; remove one"


def test_a_parent_that_is_missing_is_named(tmp_path):
    child = write(tmp_path / "child.yaml", "extends: nowhere.yaml")
    assert refusal(child) == "nowhere.yaml: no such file or directory; must be a recipe; check the path"


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("train.stepz=5", "train.stepz: unknown key; did you mean 'steps'?"),
        ("modle.d_model=5", "modle: unknown key; did you mean 'model'?"),
        ("model.moe.router.topk=2", "model.moe.router.topk: unknown key; did you mean 'top_k'?"),
        ("train.steps=1.5", "train.steps: 1.5; must be a whole number; write it as one, without quotes"),
        ("train.steps='5'", 'train.steps: "5"; must be a whole number; write it as one, without quotes'),
        ("train.steps=0", "train.steps: 0; must be above 0; raise it"),
        ("parallel.zero_stage=4", "parallel.zero_stage: 4; must be at most 3; lower it"),
        (
            "parallel.ep=all",
            'parallel.ep: "all"; must be a whole number or \'auto\'; write it as one, without quotes',
        ),
        (
            "parallel.engine=zero",
            "parallel.engine: \"zero\"; must be 'auto', 'deepspeed' or 'fsdp'; choose one",
        ),
        ("optim.betas=[0.9]", "optim.betas: missing; must be a list of two; write it like [0.9, 0.95]"),
        ("optim.lr=.inf", "optim.lr: Infinity; must be finite; write a number"),
        ("checkpoint.resume=yes", 'checkpoint.resume: "yes"; must be true or false; write one of them, without quotes'),
        ("name=a/b", 'name: "a/b"; may hold letters, digits and . _ -, and starts with no sign; rename it'),
        ("train=5", "train: 5; must be a group of keys; indent its keys below it"),
        ("model.preset=swich-lm-test", "model.preset: 'swich-lm-test'; unknown preset; did you mean 'switch-lm-test'?"),
        (
            "precision.reduce=bf16",
            "precision.reduce: bf16; gradients of fp32 products are summed in fp32; set it to fp32, or precision.compute to "
            "bf16",
        ),
        ("balance.method=bias", "balance.method: bias; moves model.moe.router.selection_bias, which is off; set it to true"),
        ("optim.warmup_steps=100", "optim.warmup_steps: 100; must be below train.steps = 100; try 10"),
        (
            "optim.decay_steps=9",
            "optim.decay_steps: 9; only schedule wsd reads it, this is cosine; set it to 0 or optim.schedule to wsd",
        ),
        ("train.steps", "'train.steps'; an override is key=value; write for example train.steps=50"),
        ("train..steps=4", "'train..steps=4'; an override is key=value; write for example train.steps=50"),
    ],
)  # fmt: skip
def test_a_bad_override_is_refused_in_one_line(base, override, text):
    assert refusal(base, override) == f"command line: {text}"


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model.d_model=-1"], "model d_model: -1; must be positive; raise it"),
        (["optim.schedule=wsd"], "optim.decay_steps: 0; schedule wsd ends in a decay; try 20"),
        (["train.micro_batches=3"], "train.global_batch: 8; must be a multiple of train.micro_batches = 3; try 9"),
        (["train.steps=5", "optim.warmup_steps=5"], "optim.warmup_steps: 5; must be below train.steps = 5; try 0"),
        (
            ["optim.schedule=wsd", "optim.decay_steps=96"],
            "optim.decay_steps: 96; with warmup_steps = 5 it must fit in train.steps = 100; try 95",
        ),
        (
            ["model.moe=null", "balance.method=bias"],
            "balance.method: bias; moves model.moe.router.selection_bias, which is off; "
            "set balance.method to none, the model has no experts",
        ),
        (
            ["model.preset=topk-lm-test"],
            "balance.method: aux_loss; the model has model.moe.router.selection_bias, which nothing would move; "
            "set balance.method to bias, or selection_bias to false",
        ),
        (
            ["model.moe.router.choice=expert"],
            "balance.method: aux_loss; with model.moe.router.choice = expert all experts take equally many tokens; set "
            "it to none",
        ),
        (
            ["model.moe.router.capacity_factor=null", "parallel.dispatch=padded"],
            "parallel.dispatch: padded; its buffers have room for model.moe.router.capacity_factor, which is null; set "
            "that to a number, for example 1.25, or this to exact",
        ),
        (
            ["model.moe=null", "balance.method=none", "parallel.dispatch=padded"],
            "parallel.dispatch: padded; the model has no experts to reach; set it to auto",
        ),
    ],
)
def test_sections_that_disagree_are_refused_in_one_line(base, overrides, text):
    assert refusal(base, *overrides).split(": ", 1)[1] == text


WSD = ["optim.schedule=wsd", "optim.decay_steps=20"]


@pytest.mark.parametrize(
    ("steps", "warmup", "decay"), [(100, 5, 20), (25, 5, 20), (24, 1, 4), (10, 0, 2), (1, 0, 1), (1000, 5, 20)]
)
def test_a_run_shortened_on_the_command_line_keeps_the_shape_of_its_schedule(base, tmp_path, steps, warmup, decay):
    long = write(tmp_path / "long.yaml", load_recipe(base, WSD).to_yaml())
    optim = load_recipe(long, [f"train.steps={steps}"]).optim
    assert (optim.warmup_steps, optim.decay_steps) == (warmup, decay)


def test_a_warmup_too_long_for_a_shorter_run_is_shortened_without_a_decay_too(base):
    assert load_recipe(base, ["train.steps=4"]).optim.warmup_steps == 0
    assert load_recipe(base, ["train.steps=6"]).optim.warmup_steps == 5


def test_numbers_of_the_schedule_that_were_asked_for_are_not_changed(base, tmp_path):
    long = write(tmp_path / "long.yaml", load_recipe(base, WSD).to_yaml())
    told = refusal(long, "train.steps=10", "optim.decay_steps=20")
    assert told.endswith("optim.decay_steps: 20; with warmup_steps = 5 it must fit in train.steps = 10; try 5")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("train: [1", "r.yaml: line 1, column 10: expected ',' or ']', but got '<stream end>'; must be YAML; "),
        ("name: a\nname: b", "r.yaml: name: stands twice (line 1 on); one would win; delete one"),
        ("- 1", "r.yaml: list; a recipe is a group of keys; begin with 'name: ...'"),
        ("name: a", "r.yaml: model: missing; every recipe needs it; add it"),
        ("extends: [a.yaml]", "r.yaml: extends: ['a.yaml']; must be one file; write its path, relative to this file"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_in_one_line(tmp_path, text, told):
    assert refusal(write(tmp_path / "r.yaml", text)).startswith(told)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert refusal(path) == "r.yaml: not text; must be YAML in UTF-8; check the path"


def test_a_recipe_cannot_be_changed(base):
    with pytest.raises(ValidationError, match="frozen"):
        load_recipe(base).train.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "value"),
    [("3e-4", 3e-4), ("1E5", 1e5), (".5", 0.5), ("1_000", 1000), ("off", "off"), ("no", "no"), ("010", "010"),
     ("1:30", "1:30"), ("2026-11-20", "2026-11-20"), ("true", True), ("~", None), ("", None), ("e5", "e5")],
)  # fmt: skip
def test_yaml_scalars_mean_what_people_mean(text, value):
    assert parse_yaml(text) == value
    assert type(parse_yaml(text)) is type(value)


@pytest.mark.parametrize(
    "value", ["3e-4", "off", "null", "1", "010", "a: b", "", 3e-4, 1e-12, 10**20, True, None, [1.5, "x"]]
)
def test_what_is_dumped_reads_back_equal(value):
    assert parse_yaml(dump_yaml({"key": value})) == {"key": value}
    assert type(yaml.safe_load(dump_yaml({"key": value}))["key"]) is type(value), "another program reads it otherwise"


def test_the_published_schema_is_current():
    published = Path(__file__).parents[3] / "docs" / "recipe.schema.json"
    assert json.loads(published.read_text()) == recipe_schema(), "run: moe-zoo schema > docs/recipe.schema.json"


def test_the_schema_knows_presets_and_parents_and_refuses_other_keys():
    schema = recipe_schema()
    assert "switch-lm-test" in schema["$defs"]["Architecture"]["properties"]["preset"]["enum"]
    assert schema["properties"]["extends"]["type"] == "string"
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["RouterSpec"]["additionalProperties"] is False


def test_the_paper_tier_imports_no_torch():
    code = "import sys, moe_zoo, moe_zoo.spec.recipe_file, moe_zoo.spec.layout, moe_zoo.spec.accounting"
    done = subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"], check=False)
    assert done.returncode == 0
