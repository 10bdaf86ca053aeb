"""What a run measures, under the names it is logged by, and where it goes: JSONL always, wandb if asked."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from moe_zoo.engines import StepStats
from moe_zoo.engines.fsdp import DTYPES
from moe_zoo.spec.errors import RecipeError
from moe_zoo.spec.recipe import Recipe

Metrics = dict[str, Any]

# Dense bf16 FLOP/s of one GPU. Source: NVIDIA's data sheets of A100, H100 SXM, H200, B200 (without sparsity).
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


def step_metrics(stats: StepStats, lr: float) -> Metrics:
    """Named numbers of one optimizer step; ``moe/load`` lists every layer's load per expert, 1.0 is even."""
    metrics: Metrics = {
        "train/loss": stats.loss,
        "train/perplexity": math.exp(min(stats.loss, 50.0)),
        "train/grad_norm": stats.grad_norm,
        "train/lr": lr,
        "train/num_targets": stats.num_targets,
    }
    if stats.counts_LE is None:
        return metrics
    load_LE = stats.counts_LE / stats.counts_LE.mean(-1, keepdim=True)
    return metrics | {
        "moe/balance_loss": stats.balance,
        "moe/z_loss": stats.z,
        "moe/max_load": load_LE.max().item(),
        "moe/min_load": load_LE.min().item(),
        "moe/dropped": stats.dropped_L.mean().item(),
        "moe/entropy": stats.entropy_L.mean().item(),
        "moe/load": [[round(load, 4) for load in row] for row in load_LE.tolist()],
        "moe/dropped_per_layer": [round(share, 5) for share in stats.dropped_L.tolist()],
        "moe/entropy_per_layer": [round(entropy, 4) for entropy in stats.entropy_L.tolist()],
    }


def peak_flops_per_s(device: torch.device, compute: str) -> float:
    """What one rank could do at best: the data sheet's figure of a known GPU, else a measured matrix product."""
    dtype = DTYPES[compute]
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)
        if known is not None:
            return known if dtype == torch.bfloat16 else known / 2  # TF32 runs at half the rate of bf16
    return _measured_flops_per_s(device, dtype)


def _measured_flops_per_s(device: torch.device, dtype: torch.dtype, size: int = 512, repeats: int = 8) -> float:
    from torch.utils.benchmark import Timer

    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
    return 2 * size**3 / min(timer.timeit(repeats).median for _ in range(3))


class MetricsFile:
    """One JSON object per line, flushed at once. A resumed run drops the lines of steps it takes again."""

    def __init__(self, path: Path, first_step: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _step_of(line) <= first_step]
            shorter = path.with_suffix(".tmp")
            shorter.write_text("".join(f"{line}\n" for line in kept))
            shorter.replace(path)
        self.file = open(path, "a")

    def write(self, step: int, metrics: Metrics) -> None:
        """Append what is known after ``step`` steps."""
        self.file.write(json.dumps({"step": step, **metrics}) + "\n")
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # what a full disk still owes, ``write`` has told already
            self.file.close()


class WandbRun:
    """The same numbers in Weights & Biases; ``offline`` writes a local folder and reaches no network."""

    def __init__(self, recipe: Recipe, folder: Path):
        try:
            import wandb
        except ImportError:
            raise RecipeError(
                f"log.wandb: {recipe.log.wandb}; wandb is not installed; pip install wandb, or log.wandb=off"
            ) from None
        mode = recipe.log.wandb
        try:
            self.run = wandb.init(
                project="moe-zoo",
                name=recipe.name,
                dir=folder,
                mode=mode,
                config=recipe.to_dict(),
                settings=wandb.Settings(silent=True),
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise RecipeError(f"log.wandb: {mode}; wandb says: {reason}; mend that, or set log.wandb=offline") from None

    def write(self, step: int, metrics: Metrics) -> None:
        """Log scalars; a list of lists becomes one curve per layer and expert."""
        self.run.log(dict(_flatten(metrics)), step=step)

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


def _flatten(metrics: Metrics):
    for name, value in metrics.items():
        if isinstance(value, list):
            for index, item in enumerate(value):
                yield from _flatten({f"{name}/{index}": item})
        else:
            yield name, value


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf  # torn by a crash
