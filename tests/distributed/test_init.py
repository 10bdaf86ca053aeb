"""A run that begins with another's weights: each rank reads its own slices of them, in any layout."""

from pathlib import Path

import pytest
import torch

import moe_zoo
from moe_zoo.certify.problem import layout_of
from moe_zoo.comm.mesh import Mesh
from moe_zoo.models.hub import from_architecture
from moe_zoo.models.source import Source, check_source
from moe_zoo.parallel.build import build_model
from moe_zoo.spec.errors import CheckpointError
from moe_zoo.testing import run_distributed
from tests.helpers import on_ranks, state
from tests.law import SEQ, make_recipe
from tests.unit.models.test_families import DEEPSEEK, LATENT, theirs
from tests.unit.models.test_switch import theirs as theirs_of_two_halves

ROOM = {"vocab_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
LAYOUTS = [
    {"parallel__ep": 4, "parallel__zero_stage": 2},
    {"parallel__tp": 2, "parallel__ep": 2, "parallel__zero_stage": 2},
    {"parallel__pp": 2, "parallel__ep": 1, "parallel__etp": 2, "parallel__zero_stage": 2},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A DeepSeek-V3 as transformers writes it, and the same as a model of ours."""
    root = tmp_path_factory.mktemp("init")
    theirs("deepseek_v3", DEEPSEEK | LATENT | ROOM).save_pretrained(root / "theirs", max_shard_size="20KB")
    whole = moe_zoo.load(root / "theirs")
    ours = from_architecture(whole.model.architecture)
    ours.load_state_dict(whole.state_dict())
    ours.save_pretrained(root / "ours")
    return root, whole


def differences(recipe, folder) -> list[str]:
    """Of this rank: names whose slice is not that of the whole model."""
    whole = moe_zoo.load(folder).model
    mesh = Mesh(layout_of(recipe, 4), torch.device("cpu"), 60)
    placed = build_model(recipe, mesh, 0, Source(folder))
    named = placed.module.global_names(placed.module.named_parameters())
    tensors = {name: placed.placements[name].take(whole.get_parameter(name)) for name in named}
    buffers = placed.module.global_names(placed.module.named_buffers())
    assert len(buffers) > 0 or not any("selection_bias" in name for name, _ in whole.named_buffers())
    found = [name for name in named if not torch.equal(named[name], tensors[name])]
    return found + [name for name in buffers if not torch.equal(buffers[name], whole.get_buffer(name))]


@pytest.mark.parametrize("kind", ["theirs", "ours"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["ep4", "tp2-ep2", "pp2-etp2"])
def test_every_rank_reads_its_slices(folders, kind, layout):
    root, whole = folders
    recipe = make_recipe(model=whole.model.architecture.to_dict(), balance__method="bias", **layout)
    assert run_distributed(differences, recipe, root / kind, world_size=4) == [[]] * 4


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=["tp2-ep2", "pp2-etp2"])
@pytest.mark.parametrize("kind", ["gpt_oss", "switch"])
def test_stacks_on_disk_biases_sinks_and_both_halves_are_sliced_too(kind, layout, tmp_path):
    if kind == "switch":
        theirs_of_two_halves(num_heads=4).save_pretrained(tmp_path)
    else:
        theirs(kind, ROOM | {"num_local_experts": 4, "num_experts_per_tok": 2}).save_pretrained(tmp_path)
    more = {"data__encoder_len": SEQ // 3} if kind == "switch" else {}
    recipe = make_recipe(model=Source(tmp_path).architecture.to_dict(), **layout, **more)
    assert run_distributed(differences, recipe, tmp_path, world_size=4) == [[]] * 4


def test_a_recipe_of_another_model_is_refused_with_the_number_that_differs(folders):
    root, whole = folders
    values = whole.model.architecture.to_dict() | {"d_model": 48}
    other = make_recipe(model=values, balance__method="bias").model
    with pytest.raises(
        CheckpointError, match=r"^init: .*/theirs; its d_model is 24, the recipe's model.d_model is 48; "
    ):
        check_source(Source(root / "theirs"), other)


def test_what_only_training_needs_may_differ(folders):
    root, whole = folders
    values = whole.model.architecture.to_dict() | {"init_std": 0.5}
    check_source(Source(root / "ours"), make_recipe(model=values, balance__method="bias").model)


def test_a_run_begins_with_the_weights_of_another_and_resumes_with_its_own(run_values, tmp_path):
    first = Path(on_ranks(run_values))
    model = moe_zoo.load(first / "model").model
    still = {"lr": 1e-12, "schedule": "constant", "weight_decay": 0.0}
    values = run_values | {"name": "second", "init": str(first / "model"), "optim": still, "parallel": {"ep": 2}}
    second = state(Path(on_ranks(values)), 6)
    for name, param in model.named_parameters():
        torch.testing.assert_close(second[name, "weight"].view_as(param), param, rtol=0, atol=1e-6)
    moved_away = values | {"init": str(tmp_path / "gone" / "model")}  # a resumed run no longer asks for it
    assert Path(on_ranks(moved_away | {"train": values["train"] | {"steps": 6}})) == tmp_path / "runs" / "second"
