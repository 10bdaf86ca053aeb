"""The command line on real ranks: what stops it loses nothing, and what is wrong is one line and exit code 2."""

import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from data_pipelines.order import RowOrder
from data_pipelines.shards import ShardReader, encode_shard
from data_pipelines.store import LocalStore
from data_pipelines.stream import WINDOW_BLOCKS
from tests.helpers import assert_same_bits, losses, state
from tests.warm_ranks import Ended, Launch

ROOT = Path(__file__).parents[2]
STEPS, ROWS_PER_BLOCK, GLOBAL_BATCH = 20, 8, 8


class Runs:
    """Commands on one recipe, whose runs go to ``folder``."""

    def __init__(self, folder: Path, recipe: Path):
        self.folder, self.recipe = folder, recipe

    def words(self, *overrides: str) -> list[str]:
        return ["train", str(self.recipe), f"log.folder={self.folder}/runs", *overrides]

    def start(self, *overrides: str, **options) -> Launch:
        return Launch(self.folder, self.words(*overrides), processes=2, **options)

    def run(self, *overrides: str, **options) -> Ended:
        return self.start(*overrides, **options).end()

    def checkpoints(self, name: str = "run") -> list[int]:
        return sorted(int(path.name[5:]) for path in (self.folder / "runs" / name / "checkpoints").glob("step-*"))


def cold(words: list[str]) -> "subprocess.Popen[str]":
    """The command as a person types it."""
    command = [sys.executable, "-m", "moe_zoo", *words, "--processes", "2"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def data(tiny_data, tmp_path_factory) -> Path:
    """The tiny corpus in small blocks: some are first read in the middle of a run."""
    made = tmp_path_factory.mktemp("blocks") / "data"
    shutil.copytree(tiny_data, made)
    reader = ShardReader(LocalStore(made), "train")
    rows = reader.rows(np.arange(reader.index.num_rows)).astype(reader.index.dtype)
    shard, raw = encode_shard(reader.index.shards[0].name, rows, ROWS_PER_BLOCK)
    index = replace(reader.index, shards=[shard], rows_per_block=ROWS_PER_BLOCK, blocks_per_shard=len(shard.blocks))
    (made / "train" / shard.name).write_bytes(raw)
    (made / "train" / "index.json").write_bytes(index.to_json())
    return made


@pytest.fixture
def runs(data, run_values, tmp_path) -> Runs:
    return make_runs(data, run_values, tmp_path)


def make_runs(data: Path, values: dict, folder: Path) -> Runs:
    values["data"]["path"] = str(data)
    values["train"] |= {"steps": STEPS, "global_batch": GLOBAL_BATCH}
    values["checkpoint"]["every"] = 5
    values["log"]["every"] = 1
    values["parallel"] = {"engine": "fsdp"}
    (folder / "r.yaml").write_text(yaml.safe_dump(values))
    return Runs(folder, folder / "r.yaml")


@pytest.fixture(scope="module")
def unbroken(data, tmp_path_factory) -> Path:
    """The folder of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("unbroken")
    return folder / "runs" / "run"


@pytest.fixture(autouse=True)
def finish_unbroken(unbroken, data, run_values) -> None:
    if not unbroken.exists():
        ended = make_runs(data, run_values | {}, unbroken.parents[1]).run()
        assert (ended.code, ended.stderr) == (0, "")


def copy_stopped(unbroken: Path, runs: Runs, step: int) -> Path:
    """The unbroken run's folder as it stood after ``step``."""
    target = runs.folder / "runs" / "run"
    shutil.copytree(unbroken, target)
    for folder in (target / "checkpoints").iterdir():
        if folder.name != f"step-{step:08d}":
            shutil.rmtree(folder)
    return target


def assert_goes_on(runs: Runs, unbroken: Path, after: int) -> None:
    """The same command ends the run as if nothing had happened."""
    ended = runs.run()
    assert (ended.code, ended.stderr) == (0, "")
    assert f"resumed after step {after}\n" in ended.stdout
    folder = runs.folder / "runs" / "run"
    assert_same_bits(state(unbroken, STEPS), state(folder, STEPS))
    assert losses(unbroken) == losses(folder)


def stopped_after(stdout: str) -> int:
    return int(re.search(r"^stopped after step (\d+); the same command goes on from there$", stdout, re.M)[1])


def test_sigterm_to_the_command_saves_and_the_same_command_goes_on(runs, unbroken):
    process = cold(runs.words("checkpoint.every=0"))
    seen = ""
    while f"step  2/{STEPS}" not in seen:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        seen += line
    process.send_signal(signal.SIGTERM)
    rest, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    step = stopped_after(seen + rest)
    assert runs.checkpoints() == [step] and 2 <= step < STEPS
    assert_goes_on(runs, unbroken, step)


def test_ctrl_c_on_the_ranks_saves_and_the_same_command_goes_on(runs, unbroken):
    ended = runs.start("checkpoint.every=0").when_told(f"step  2/{STEPS}", signal.SIGINT).end()
    assert (ended.code, ended.stderr) == (0, "")
    assert runs.checkpoints() == [stopped_after(ended.stdout)]
    assert_goes_on(runs, unbroken, stopped_after(ended.stdout))


def test_a_finished_run_says_that_nothing_is_left_of_it(runs, unbroken):
    copy_stopped(unbroken, runs, STEPS)
    ended = runs.run()
    assert (ended.code, ended.stderr) == (0, "")
    assert f"nothing is left of its {STEPS} steps; name=ANOTHER starts another run\n" in ended.stdout


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_the_ranks_that_outlive_a_killed_one_say_so_in_one_line(runs, engine):
    one_by_one = [f"parallel.engine={engine}", "checkpoint.every=1"]
    ended = runs.start(*one_by_one).when_told("step 2: saved", signal.SIGKILL, slice(1, 2)).end()
    assert re.fullmatch(
        r"error: train: rank 0 waits in step \d+, [a-z' ]+( \d)?, \w+, for another rank, which ended; its own message, "
        r"or the log of what "
        r"killed it, says why; the same command goes on from the last checkpoint\n",
        ended.stderr,
    ), ended.stderr
    again = runs.run(*one_by_one)
    assert (again.code, again.stderr) == (0, "")
    assert int(re.search(r"resumed after step (\d+)", again.stdout)[1]) >= 2


def test_a_shard_that_is_corrupt_in_mid_run_costs_no_step(runs, data, unbroken):
    copy = runs.folder / "data"
    shutil.copytree(data, copy)
    runs.recipe.write_text(runs.recipe.read_text().replace(str(data), str(copy)))
    window = WINDOW_BLOCKS * ROWS_PER_BLOCK
    bad_step = window // GLOBAL_BATCH  # the first that reads the second window
    reader = ShardReader(LocalStore(copy), "train")
    row = int(RowOrder(0, reader.index.num_rows, window).rows(window, 1)[0])
    shard = copy / "train" / reader.index.shards[0].name
    whole = shard.read_bytes()
    damaged = bytearray(whole)
    damaged[row * reader.index.row_bytes] ^= 1
    shard.write_bytes(damaged)

    code, told, errors = runs.run()
    assert code == 2
    assert errors.startswith(f"error: {copy}/train/{shard.name}: block {row // ROWS_PER_BLOCK} has xxh3_128 ")
    assert errors.endswith(
        "; a block must match the hash in its index; restore this shard from a good copy, or delete the folder and "
        "prepare again\n"
    )
    assert errors.count("\n") == 1
    assert stopped_after(told) == bad_step and runs.checkpoints() == [5, 10, 15, bad_step]
    shard.write_bytes(whole)
    assert_goes_on(runs, unbroken, bad_step)


WRONG = {
    "a wrong key": ("train.step=5", "command line: train.step: unknown key; did you mean 'steps'?"),
    "a wrong value": ("train.steps=many", 'command line: train.steps: "many"; must be a whole number; write it as one, '
                      "without quotes"),
    "experts that ranks cannot share": ("parallel.ep=3", "parallel.ep: 3; must divide the 2 ranks launched; try 2, or "
                                        "auto"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_can_be_refused_before_a_rank_starts_is(runs, what):
    override, text = WRONG[what]
    process = cold(runs.words(override))
    told, errors = process.communicate(timeout=60)
    assert (process.returncode, told, errors) == (2, "", f"error: {text}\n")


REFUSED = {
    "missing data": (
        ["data.path=/nowhere"],
        "/nowhere: no train/index.json; a stream reads a finished preparation; check the path, or run "
        "data_pipelines.prepare to the end",
    ),
    "missing tokenizer": (
        ["data.tokenizer=/nowhere"],
        "/nowhere: no SHA256SUMS; a tokenizer folder is written by train_tokenizer; check the path",
    ),
    "another tokenizer": (
        [f"data.tokenizer={ROOT}/tokenizers/stdlib-2k"],
        f"data.tokenizer: {ROOT}/tokenizers/stdlib-2k; its size, bos and eos are (2048, 1, 2), those of {{data}} are "
        f"(1024, 1, 2); set it to the tokenizer that the data was prepared with",
    ),
    "more tokens than the model has": (
        ["model.vocab_size=512"],
        "model.vocab_size: 512; the data in {data} has 1024 tokens; raise it to that",
    ),
    "rows of another length": (
        ["data.seq_len=16"],
        "data.seq_len: 16; {data} was prepared for 32; set it so, or prepare another folder",
    ),
    "a log folder that is a file": (
        ["log.folder=/proc/version"],
        "log.folder: /proc/version/other; Not a directory; a run reads and writes there; free it, or set log.folder to "
        "another",
    ),
    "stage 0 in bf16": (
        ["precision.compute=bf16", "parallel.engine=deepspeed", "parallel.zero_stage=0"],
        "parallel.zero_stage: 0; DeepSpeed keeps fp32 gradients of a bf16 model at stages 2 and 3 only; set one of them",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_mistake_is_one_line_and_code_2(runs, data, what):
    overrides, text = REFUSED[what]
    ended = runs.run("name=other", *overrides)
    assert ended == Ended(2, "", f"error: {text.format(data=data)}\n")


def test_wandb_that_is_not_installed_is_one_line(runs):
    ended = runs.run("log.wandb=offline", without=("wandb",))
    text = "log.wandb: offline; wandb is not installed; pip install wandb, or log.wandb=off"
    assert ended == Ended(2, "", f"error: {text}\n")


def test_wandb_offline_writes_files_and_asks_for_nothing(runs):
    ended = runs.run("log.wandb=offline", "train.steps=3")
    assert (ended.code, ended.stderr) == (0, "")
    written = list((runs.folder / "runs" / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(written) == 1 and b"train/loss" in written[0].read_bytes()


def test_a_checkpoint_of_another_model_stays_and_is_one_line(runs, unbroken):
    folder = copy_stopped(unbroken, runs, 5)
    ended = runs.run("model.d_model=16", "model.num_layers=1")
    assert ended == Ended(
        2,
        "",
        f"error: checkpoint {folder}/checkpoints/step-00000005: holds another model, model.d_model is 32 there and 16 "
        f"in the recipe; give the run another name, or set checkpoint.resume=false\n",
    )
    assert runs.checkpoints() == [5]


def test_a_disk_too_full_for_a_checkpoint_leaves_the_last_one(runs, unbroken):
    folder = copy_stopped(unbroken, runs, 5)
    ended = runs.run(max_file_bytes=65536)
    assert ended.code == 2
    assert re.fullmatch(
        rf"error: checkpoint {folder}/checkpoints/step-00000010: File too large; \d+ MiB are free; earlier checkpoints "
        r"are whole: free some space or lower checkpoint.keep, and start again to resume\n",
        ended.stderr,
    )
    assert runs.checkpoints() == [5]
    assert_goes_on(runs, unbroken, 5)


def test_a_disk_too_full_for_the_metrics_stops_all_ranks_after_a_checkpoint(runs, unbroken):
    folder = copy_stopped(unbroken, runs, 5)
    metrics = folder / "metrics.jsonl"
    metrics.write_text('{"step": 1, "padding": "' + "x" * 2_000_000 + '"}\n')  # larger than any checkpoint file
    ended = runs.run(max_file_bytes=metrics.stat().st_size + 100)
    assert (ended.code, ended.stderr) == (
        2,
        f"error: log.folder: {folder}; File too large; a run reads and writes there; free it, or set log.folder to "
        f"another\n",
    )
    assert stopped_after(ended.stdout) == 6 and runs.checkpoints() == [5, 6]


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_a_loss_that_is_not_finite_is_one_line_and_leaves_the_last_checkpoint(runs, engine):
    ended = runs.run(f"parallel.engine={engine}", "optim.lr=1e30", "checkpoint.every=1")
    assert (ended.code, ended.stderr) == (
        2,
        "error: train: the gradient norm is nan; the step was not taken; lower optim.lr, raise optim.warmup_steps or "
        "set balance.z_coefficient, and resume from the last checkpoint\n",
    )
    assert runs.checkpoints() == [1]
