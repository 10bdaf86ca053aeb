"""Names and values of what is logged, and the file it goes to."""

import json
import math

import pytest
import torch

from moe_zoo.engines import StepStats
from moe_zoo.spec.errors import RecipeError
from moe_zoo.spec.recipe import Recipe
from moe_zoo.train.metrics import MetricsFile, WandbRun, _flatten, peak_flops_per_s, step_metrics
from moe_zoo.train.run_folder import RunFolder

DENSE = StepStats(2.0, 0.0, 0.0, 0.5, 90, 96, None, None, None)
SPARSE = DENSE._replace(
    balance=1.25,
    z=3.0,
    counts_LE=torch.tensor([[6.0, 2.0, 4.0, 0.0], [3.0, 3.0, 3.0, 3.0]]),
    entropy_L=torch.tensor([1.0, 0.5]),
    dropped_L=torch.tensor([0.25, 0.0]),
)


def test_a_dense_step_has_these_metrics():
    assert step_metrics(DENSE, lr=0.1) == {
        "train/loss": 2.0,
        "train/perplexity": math.exp(2.0),
        "train/grad_norm": 0.5,
        "train/lr": 0.1,
        "train/num_targets": 90,
    }


def test_a_sparse_step_has_these_too():
    found = step_metrics(SPARSE, lr=0.1)
    assert {name: value for name, value in found.items() if name.startswith("moe/")} == {
        "moe/balance_loss": 1.25,
        "moe/z_loss": 3.0,
        "moe/max_load": 2.0,  # 6 slots where 3 are even
        "moe/min_load": 0.0,
        "moe/dropped": 0.125,
        "moe/entropy": 0.75,
        "moe/load": [[2.0, 0.6667, 1.3333, 0.0], [1.0, 1.0, 1.0, 1.0]],
        "moe/dropped_per_layer": [0.25, 0.0],
        "moe/entropy_per_layer": [1.0, 0.5],
    }
    assert json.loads(json.dumps(found)) == found


def test_a_loss_beyond_floats_has_a_perplexity():
    assert step_metrics(DENSE._replace(loss=1e6), lr=0.1)["train/perplexity"] == math.exp(50)


def test_wandb_gets_one_curve_per_layer_and_expert():
    flat = dict(_flatten({"train/loss": 1.0, "moe/load": [[1.0, 2.0], [3.0, 4.0]], "moe/entropy_per_layer": [5.0]}))
    assert flat == {
        "train/loss": 1.0,
        "moe/load/0/0": 1.0,
        "moe/load/0/1": 2.0,
        "moe/load/1/0": 3.0,
        "moe/load/1/1": 4.0,
        "moe/entropy_per_layer/0": 5.0,
    }


def written(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_drops_the_lines_of_steps_it_takes_again_and_a_torn_one(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    first = MetricsFile(path, first_step=0)
    for step in range(1, 5):
        first.write(step, {"train/loss": float(step)})
    first.close()
    path.write_text(path.read_text() + '{"step": 5, "train/l')
    again = MetricsFile(path, first_step=2)
    again.write(3, {"train/loss": -3.0})
    again.close()
    assert [(row["step"], row["train/loss"]) for row in written(path)] == [(1, 1.0), (2, 2.0), (3, -3.0)]


@pytest.mark.parametrize("line", ["", "[]", "7", '{"other": 1}'])
def test_a_line_that_is_no_metrics_is_dropped(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{line}\n{{"step": 1}}\n')
    MetricsFile(path, first_step=1).close()
    assert written(path) == [{"step": 1}]


def test_a_line_can_be_read_before_the_run_ends(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", first_step=0)
    file.write(1, {"train/loss": 2.5})
    assert written(tmp_path / "metrics.jsonl") == [{"step": 1, "train/loss": 2.5}]
    file.close()


def test_a_full_disk_is_named_and_the_run_can_still_close(run_values):
    run = RunFolder(Recipe.from_dict(run_values))
    log = MetricsFile(run.path / "metrics.jsonl", first_step=0)
    log.file.close()
    log.file = open("/dev/full", "a")
    run.logs.append(log)
    with pytest.raises(RecipeError) as caught:
        run.log(1, {"train/loss": 1.0})
    assert str(caught.value) == (
        f"log.folder: {run.path}; No space left on device; a run reads and writes there; free it, or set log.folder to "
        f"another"
    )
    log.close()


def test_wandb_online_without_a_key_is_one_line(run_values, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def refuse(**settings):
        raise wandb.Error("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", refuse)
    run_values["log"]["wandb"] = "online"
    with pytest.raises(RecipeError) as caught:
        WandbRun(Recipe.from_dict(run_values), tmp_path)
    assert str(caught.value) == (
        "log.wandb: online; wandb says: No API key configured. Use `wandb login` to log in.; mend that, or set "
        "log.wandb=offline"
    )


def test_the_peak_of_a_processor_is_measured():
    assert 1e8 < peak_flops_per_s(torch.device("cpu"), "fp32") < 1e14
