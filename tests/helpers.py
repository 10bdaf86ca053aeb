"""Runs of the trainer on the ranks of a pool, and what they left on disk."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from moe_zoo.comm.launch import World
from moe_zoo.spec.recipe import Recipe
from moe_zoo.testing import run_distributed
from moe_zoo.train.checkpoint import Checkpoint
from moe_zoo.train.trainer import train

State = dict[tuple[str, str], torch.Tensor]


def run(values: dict) -> str:
    """On a rank: train a recipe of plain values."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return str(train(Recipe.from_dict(values), World(rank, world, rank, world, "torchrun")))


def on_ranks(values: dict, world_size: int = 2, body=run) -> str:
    """The run's folder, or what ``body`` returned on rank 0."""
    return run_distributed(body, values, world_size=world_size)[0]


def moved(values: dict, tmp_path: Path, keep_step: int, to: str = "again", source: Path | None = None) -> dict:
    """The same run in another folder, as if it had been stopped after ``keep_step``."""
    source, target = source or tmp_path / "runs" / "run", tmp_path / to / "run"
    shutil.copytree(source, target)
    for folder in (target / "checkpoints").iterdir():
        if folder.name != f"step-{keep_step:08d}":
            shutil.rmtree(folder)
    return values | {"log": values["log"] | {"folder": str(tmp_path / to)}}


def state(folder: Path, step: int) -> State:
    """Every tensor of a run's checkpoint, flat."""
    checkpoint = Checkpoint(folder / "checkpoints" / f"step-{step:08d}")
    shapes = {key: sum(chunk.length for chunk, _ in runs) for key, runs in checkpoint.chunks.items()}
    return {key: checkpoint.fetch(*key, 0, length) for key, length in shapes.items()}


def assert_same_bits(before: State, after: State) -> None:
    """Two checkpoints hold the same values under the same names."""
    assert before.keys() == after.keys() and {key for _, key in before} == {"weight", "exp_avg", "exp_avg_sq", "buffer"}
    for key in before:
        assert torch.equal(before[key], after[key]), key


def losses(folder: Path) -> dict[int, float]:
    """Training loss by step; no step stands twice."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == len({row["step"] for row in rows})
    return {row["step"]: row["train/loss"] for row in rows}


def run_where_moe_zoo_is_not_installed(script: str, folder: Path) -> None:
    """Run Python in another process, in ``folder``, to which our packages do not exist and no hub answers."""
    absent = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("moe_zoo", "data_pipelines"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
"""
    env = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", absent + script], capture_output=True, text=True, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
