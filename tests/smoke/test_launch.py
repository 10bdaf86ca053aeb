"""Every documented way to start a run makes the world it says, or is refused with the command that does.

The ranks are real processes of the real command line; ``probe/`` replaces only the trainer.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROBE = Path(__file__).parent / "probe"
PYTHON = (sys.executable,)
ACCELERATE = (*PYTHON, "-m", "accelerate.commands.launch")
TORCHRUN = (*PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2")
TRAIN = ("-m", "moe_zoo", "train")
TIMEOUT_S = 120
RECIPE = """
name: probe
model: {preset: switch-lm-test}
data: {path: data, tokenizer: tokenizer, seq_len: 8}
train: {steps: 2, global_batch: 4}
optim: {lr: 1e-3}
log: {wandb: off}
"""


class Launch:
    """Commands run in the repository's root on a recipe whose runs go to ``seen``."""

    def __init__(self, folder: Path):
        self.recipe, self.seen = folder / "probe.yaml", folder / "seen"
        self.recipe.write_text(RECIPE)
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "SLURM_"))
        }
        # HF_HOME: a developer's own accelerate config must not decide the test
        self.env = inherited | {
            "PYTHONPATH": f"{PROBE}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", "HF_HOME": str(folder)}  # fmt: skip

    def words(self, *command: str, name: str = "probe") -> list[str]:
        return [word.format(recipe=self.recipe) for word in command] + [f"log.folder={self.seen}", f"name={name}"]

    def run(self, *command: str, name: str = "probe") -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.words(*command, name=name), cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def start(self, *command: str, name: str, ready: int) -> "subprocess.Popen[bytes]":
        """Start, and return when ``ready`` ranks wait for a signal."""
        process = subprocess.Popen(self.words(*command, name=name), cwd=ROOT, env=self.env)
        until(lambda: len(list(self.seen.glob("*.ready"))) == ready)
        return process

    def ranks(self) -> list[dict]:
        return [json.loads(file.read_text()) for file in sorted(self.seen.glob("*.json"))]


def until(happened) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(tmp_path)


def config(launch: Launch, kind: str) -> str:
    """cpu_x2.yaml with another distributed type."""
    text = (ROOT / "recipes/launch/cpu_x2.yaml").read_text()
    changed = launch.recipe.with_name(f"{kind}.yaml")
    changed.write_text(text.replace("distributed_type: MULTI_GPU", f"distributed_type: {kind}"))
    assert changed.read_text() != text
    return str(changed)


@pytest.mark.parametrize(
    ("command", "launcher", "world"),
    [
        pytest.param((*ACCELERATE, "recipes/", "{recipe}"), "accelerate", 1, id="accelerate"),
        pytest.param(
            (*ACCELERATE, "--config_file", "recipes/launch/cpu_x2.yaml", "recipes/", "{recipe}", "train.steps=50"),
            "accelerate", 2, id="accelerate-cpu_x2"),
        pytest.param((*ACCELERATE, "--multi_gpu", "--num_processes", "2", "recipes/", "{recipe}"),
            "accelerate", 2, id="accelerate-multi_gpu"),
        pytest.param((*ACCELERATE, "--use_deepspeed", "--num_processes", "2", "--zero_stage", "3", "recipes/", "{recipe}"),
            "accelerate", 2, id="accelerate-deepspeed"),
        pytest.param((*TORCHRUN, *TRAIN, "{recipe}"), "torchrun", 2, id="torchrun"),
        pytest.param((*PYTHON, *TRAIN, "{recipe}", "--processes", "2"), "moe-zoo", 2, id="moe-zoo-processes"),
        pytest.param((*PYTHON, *TRAIN, "{recipe}"), "none", 1, id="moe-zoo"),
    ],
)  # fmt: skip
def test_a_launch_makes_the_world_it_says(launch, command, launcher, world):
    done = launch.run(*command)
    assert done.returncode == 0, done.stderr
    ranks = launch.ranks()
    assert [rank["rank"] for rank in ranks] == list(range(world))
    assert all((rank["world"], rank["sum"], rank["ranks_per_node"]) == (world, world, world) for rank in ranks)
    assert {rank["launcher"] for rank in ranks} == {launcher}
    assert {rank["threads"] for rank in ranks} == {1}


@pytest.mark.slow
def test_a_config_under_which_accelerate_itself_would_train_twice_alone_makes_one_world(launch):
    done = launch.run(*ACCELERATE, "--config_file", config(launch, "FSDP"), "recipes/", "{recipe}")
    assert done.returncode == 0, done.stderr
    assert [rank["sum"] for rank in launch.ranks()] == [2, 2]


@pytest.mark.parametrize("how", ["--cpu", "MULTI_CPU"])
def test_one_process_where_accelerate_was_asked_for_two_is_refused(launch, how):
    asked = ("--cpu", "--num_processes=2") if how == "--cpu" else ("--config_file", config(launch, how))
    done = launch.run(*ACCELERATE, *asked, "recipes/", "{recipe}")
    assert done.returncode != 0
    words = launch.words("recipes/", "{recipe}")
    assert (
        "error: launch: 1 process; accelerate was asked for 2 and started 1, as it does with --cpu, MULTI_CPU or NO; "
        f"run accelerate launch --multi_gpu --num_processes 2 {' '.join(words)} (--multi_gpu needs no GPU)\n"
    ) in done.stderr
    assert not launch.ranks()


def test_a_mistake_that_every_rank_makes_is_told_once_and_exits_2(launch):
    done = launch.run(*PYTHON, *TRAIN, "{recipe}", "--processes", "2", name="all-fail")
    assert done.returncode == 2
    assert done.stderr == "error: probe: every rank; refuses alike; nothing to do\n"


def test_a_mistake_of_one_rank_is_told_by_it_and_stops_the_others(launch):
    done = launch.run(*PYTHON, *TRAIN, "{recipe}", "--processes", "2", name="last-fails")
    assert done.returncode == 2
    assert done.stderr == "rank 1: probe: the last rank; refuses alone; nothing to do\n"
    assert [rank["stopped"] for rank in launch.ranks()] == [[signal.SIGTERM]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_rank_once(launch, number):
    process = launch.start(*PYTHON, *TRAIN, "{recipe}", "--processes", "2", name="waits", ready=2)
    process.send_signal(number)
    assert process.wait(TIMEOUT_S) == 0
    assert [rank["stopped"] for rank in launch.ranks()] == [[number], [number]]


@pytest.mark.parametrize("launcher", ["accelerate", "moe-zoo"])
def test_a_rank_is_told_to_stop_when_its_launcher_is_killed(launch, launcher):
    if launcher == "accelerate":
        process = launch.start(*ACCELERATE, "recipes/", "{recipe}", name="waits", ready=1)
    else:
        process = launch.start(*PYTHON, *TRAIN, "{recipe}", "--processes", "2", name="waits", ready=2)
    num_ranks = len(list(launch.seen.glob("*.ready")))
    process.kill()
    process.wait()
    until(lambda: len(list(launch.seen.glob("*.json"))) == num_ranks)
    assert [rank["stopped"] for rank in launch.ranks()] == [[signal.SIGTERM]] * num_ranks


@pytest.mark.slow
def test_ranks_that_torchrun_restarts_find_each_other(launch):
    done = launch.run(*TORCHRUN, "--max-restarts", "1", *TRAIN, "{recipe}", name="restarts")
    assert done.returncode == 0, done.stderr
    assert [rank["sum"] for rank in launch.ranks()] == [2, 2]


@pytest.mark.parametrize("name", ["cpu_x2", "node_x8", "multi_node"])
def test_every_launch_config_is_one_accelerate_understands(name):
    from accelerate.commands.config.config_args import load_config_from_file

    loaded = load_config_from_file(str(ROOT / "recipes" / "launch" / f"{name}.yaml"))
    assert loaded.distributed_type == "MULTI_GPU", "the only type that starts several ranks everywhere"
    assert loaded.num_processes == {"cpu_x2": 2, "node_x8": 8, "multi_node": 16}[name]
