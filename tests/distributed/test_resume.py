"""A run that stopped and resumed is the unbroken run; what is damaged is named and never believed."""

import fcntl
import json
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_zoo.spec.errors import CheckpointError, RecipeError
from moe_zoo.train.checkpoint import Checkpoint
from moe_zoo.train.checkpoint.format import digest
from tests.helpers import State, assert_same_bits, losses, moved, on_ranks, run, state

ENGINES = [("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3), ("fsdp", 3)]


def expect_refusal(values: dict) -> str:
    with pytest.raises(CheckpointError) as caught:
        run(values)
    return str(caught.value)


@pytest.mark.parametrize(("engine", "zero_stage"), ENGINES)
def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(run_values, tmp_path, engine, zero_stage):
    values = run_values | {"parallel": {"engine": engine, "zero_stage": zero_stage, "ep": 2}}
    unbroken = Path(on_ranks(values))
    resumed = Path(on_ranks(moved(values, tmp_path, keep_step=3)))
    assert_same_bits(state(unbroken, 6), state(resumed, 6))
    assert losses(unbroken) == losses(resumed)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_an_optimizer_in_host_memory_resumes_bit_for_bit(run_values, tmp_path, zero_stage):
    values = run_values | {"parallel": {"engine": "deepspeed", "zero_stage": zero_stage, "offload": "optimizer"}}
    unbroken = Path(on_ranks(values))
    resumed = Path(on_ranks(moved(values, tmp_path, keep_step=3)))
    assert_same_bits(state(unbroken, 6), state(resumed, 6))


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_a_pipeline_evaluates_samples_saves_and_resumes_bit_for_bit(run_values, tmp_path, engine):
    values = run_values | {"parallel": {"engine": engine, "pp": 2}}
    unbroken = Path(on_ranks(values))
    resumed = Path(on_ranks(moved(values, tmp_path, keep_step=3)))
    assert_same_bits(state(unbroken, 6), state(resumed, 6))
    alone = moved(run_values | {"parallel": {"engine": engine}}, tmp_path, keep_step=3, to="alone")
    whole = Path(on_ranks(alone, world_size=1))
    assert losses(whole)[6] == pytest.approx(losses(unbroken)[6], abs=1e-4)


def test_a_run_resumes_on_another_engine_and_another_number_of_ranks(run_values, tmp_path):
    values = run_values | {"parallel": {"engine": "deepspeed", "zero_stage": 3}}
    unbroken = Path(on_ranks(values))
    elsewhere = moved(values | {"parallel": {"engine": "fsdp", "zero_stage": 3, "ep": 2}}, tmp_path, keep_step=3)
    resumed = Path(on_ranks(elsewhere, world_size=4))
    assert_near(state(unbroken, 6), state(resumed, 6))
    for step, loss in losses(unbroken).items():
        assert losses(resumed)[step] == pytest.approx(loss, abs=1e-4)


def assert_near(before: State, after: State) -> None:
    """Two runs of the same steps that rounded otherwise."""
    assert before.keys() == after.keys()
    for name, key in before:
        atol = 1e-5 if key != "weight" else 5e-4  # Adam turns rounding of tiny gradients into parts of lr
        torch.testing.assert_close(before[name, key], after[name, key], atol=atol, rtol=1e-3)


LAYOUTS = [
    ({"engine": "deepspeed", "tp": 2, "ep": 2}, 2),
    ({"engine": "fsdp", "cp": 2, "tp": 2, "ep": 2}, 4),
    ({"engine": "fsdp", "replicate": 2, "tp": 2}, 4),
    ({"engine": "deepspeed", "zero_stage": 1, "pp": 2, "tp": 2}, 4),
]


def test_a_run_resumes_in_layouts_that_cut_its_weights_otherwise(run_values, tmp_path):
    """A chain: each layout goes on from what the one before it saved, a step later."""
    run_values["model"]["tie_embeddings"] = True
    values = run_values | {"checkpoint": {"every": 1, "keep": None}}
    newest = whole = Path(on_ranks(values | {"parallel": {"engine": "fsdp"}}, world_size=1))
    for step, (parallel, world_size) in enumerate(LAYOUTS, start=1):
        elsewhere = moved(values | {"parallel": parallel}, tmp_path, keep_step=step, to=f"hop{step}", source=newest)
        newest = Path(on_ranks(elsewhere, world_size=world_size))
        assert_near(state(whole, 6), state(newest, 6))


def test_a_damaged_checkpoint_is_named_and_skipped_for_the_last_good_one(run_values, tmp_path):
    unbroken = Path(on_ranks(run_values))
    before = state(unbroken, 6)
    data = unbroken / "checkpoints" / "step-00000006" / "rank-00001.bin"
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"rank-00001.bin is damaged at byte \d+ .*; its hash is not the one"):
        Checkpoint(data.parent).verify()
    shutil.rmtree(tmp_path / "again", ignore_errors=True)
    values = run_values | {"log": run_values["log"] | {"folder": str(tmp_path / "again")}}
    shutil.copytree(unbroken, tmp_path / "again" / "run")
    shutil.rmtree(tmp_path / "again" / "run" / "checkpoints" / "step-00000006")
    assert_same_bits(before, state(Path(on_ranks(values)), 6))
    assert on_ranks(run_values, body=seen_at_start) == "skipped 6, found 3"
    assert_same_bits(before, state(Path(on_ranks(run_values)), 6))  # the damaged one is replaced on the way


def test_a_run_that_starts_anew_keeps_the_earlier_one_beside_it(run_values):
    folder = Path(on_ranks(run_values))
    before = state(folder, 6)
    anew = run_values | {"train": run_values["train"] | {"seed": 1, "steps": 3}}
    anew["checkpoint"] = run_values["checkpoint"] | {"resume": False}
    for number in (1, 2):
        assert Path(on_ranks(anew)) == folder
        assert (folder.parent / f"run.{number}" / "metrics.jsonl").exists()
    assert_same_bits(before, state(folder.parent / "run.1", 6))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000003"]
    import moe_zoo

    exported = moe_zoo.load(folder / "model").model.embed.weight
    assert torch.equal(exported.detach().flatten(), state(folder, 3)["embed.weight", "weight"])


def seen_at_start(values: dict) -> str:
    from moe_zoo.train.checkpoint import latest_checkpoint

    skipped = []
    found = latest_checkpoint(Path(values["log"]["folder"]) / "run" / "checkpoints", skipped.append)
    assert len(skipped) == 1 and "step-00000006" in skipped[0]
    return f"skipped 6, found {found.step}"


def test_training_never_starts_anew_over_damaged_checkpoints(run_values):
    folder = Path(on_ranks(run_values))
    for data in folder.glob("checkpoints/*/rank-00000.bin"):
        data.write_bytes(data.read_bytes()[:-1])
    text = on_ranks(run_values, body=expect_refusal)
    assert text.startswith(f"checkpoint {folder}/checkpoints: none of 2 checkpoints is whole; training does not start")


def test_a_checkpoint_of_another_model_is_refused(run_values):
    folder = Path(on_ranks(run_values))
    run_values["model"]["moe"]["router"]["top_k"] = 1
    assert on_ranks(run_values, body=expect_refusal) == (
        f"checkpoint {folder}/checkpoints/step-00000006: holds another model, model.moe.router.top_k is 2 there and 1 "
        f"in the recipe; give the run another name, or set checkpoint.resume=false"
    )


def with_a_full_disk(values: dict) -> str:
    """No file may pass 64 KiB: the kernel refuses the write as it would on a full disk."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))
    try:
        return expect_refusal(values)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_is_one_line_and_leaves_the_earlier_checkpoint(run_values):
    first = run_values | {"train": run_values["train"] | {"steps": 3}, "optim": {"lr": 1e-2, "schedule": "constant"}}
    folder = Path(on_ranks(first))
    text = on_ranks(run_values, body=with_a_full_disk)
    assert text.startswith(f"checkpoint {folder}/checkpoints/step-00000006: File too large; ")
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000003"]


def test_keep_drops_the_oldest_and_the_model_folder_holds_the_last_weights(run_values):
    values = run_values | {"checkpoint": {"every": 2, "keep": 2}}
    folder = Path(on_ranks(values))
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
    import moe_zoo

    exported = dict(moe_zoo.load(folder / "model").model.named_parameters())
    for (name, key), values in state(folder, 6).items():
        if key == "weight":
            assert torch.equal(exported[name].detach().flatten(), values), name


def test_data_prepared_anew_in_the_same_place_is_refused(run_values):
    folder = Path(on_ranks(run_values))
    data = Path(run_values["data"]["path"])
    for manifest in folder.glob("checkpoints/*/MANIFEST.json"):
        values = json.loads(manifest.read_text())
        values["stream"]["fingerprint"] = "0" * 32  # as if another corpus had been there
        values.pop("sha256")
        manifest.write_text(json.dumps(values | {"sha256": digest(values)}))
    text = on_ranks(run_values, body=expect_refusal)
    assert text.startswith(f"checkpoint {folder}/checkpoints/step-00000006: {data} holds other data than when it was")


def test_a_resumed_run_with_another_batch_size_repeats_and_skips_no_row(run_values, tmp_path):
    on_ranks(run_values)
    values = moved(run_values, tmp_path, keep_step=3)
    values["train"] = values["train"] | {"global_batch": 4}
    again = Path(on_ranks(values))
    positions = [Checkpoint(again / "checkpoints" / f"step-{s:08d}").stream["position"] for s in (3, 6)]
    assert positions == [3 * 8, 3 * 8 + 3 * 4]


def refused_while_another_writes(values: dict) -> str:
    """The lock that a run holds is held by somebody else."""
    path = Path(values["log"]["folder"])
    path.mkdir(parents=True, exist_ok=True)
    with open(path / ".run.lock", "w") as other:
        if dist.get_rank() == 0:
            fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RecipeError) as caught:
            run(values)
        return str(caught.value)


def test_two_runs_do_not_write_one_folder(run_values):
    text = on_ranks(run_values, body=refused_while_another_writes)
    folder = Path(run_values["log"]["folder"]) / "run"
    assert text == (f"log.folder: {folder}; another run is writing there; wait for it, or give this one another name")
    assert not folder.exists()
    on_ranks(run_values)  # the other has ended: its lock went with it


def test_a_checkpoint_of_another_version_is_named(run_values):
    folder = Path(on_ranks(run_values)) / "checkpoints" / "step-00000006"
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    manifest.pop("sha256")
    manifest["recipe"]["train"]["a_key_of_another_version"] = 1
    (folder / "MANIFEST.json").write_text(json.dumps(manifest | {"sha256": digest(manifest)}))
    with pytest.raises(CheckpointError, match=r"step-00000006: its recipe is of another version of moe-zoo .*a_key_of"):
        Checkpoint(folder)
