"""Tokens per second of a Qwen3-MoE, forward alone and with backward: ours beside transformers.

    OMP_NUM_THREADS=1 python -m benchmarks.forward [--dtype bf16] [--experts 32] [--rounds 7] [--json out.json]

All contestants hold the same weights and give the same logits, which is checked first. One process, one thread, process
CPU seconds; contestants take turns in each round. A ratio is the median over rounds of a contestant's speed over that
of the best of transformers' own in the same round. ``transformers + ours`` is their model with
``experts_implementation="moe_zoo"``.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import moe_zoo
from moe_zoo.comm.processes import tune_allocator

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
THEIRS = ("grouped_mm", "eager")


class Shape(NamedTuple):
    """Model and batch: those of the facts, so that figures can be compared."""

    vocab_size: int = 8192
    width: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    experts: int = 32
    expert_width: int = 256
    top_k: int = 4
    rows: int = 4
    seq_len: int = 512


QUICK = Shape(vocab_size=64, width=32, layers=2, experts=4, expert_width=16, top_k=2, rows=2, seq_len=16)


def contestants(shape: Shape, dtype: torch.dtype) -> dict[str, nn.Module]:
    """The same model, four ways."""
    config = Qwen3MoeConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.width // shape.heads,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        moe_intermediate_size=shape.expert_width,
        norm_topk_prob=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        made: dict[str, nn.Module] = {"ours": moe_zoo.load(folder, dtype=dtype)}
        for name, kind in (*((kind, kind) for kind in THEIRS), ("transformers + ours", "moe_zoo")):
            made[name] = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation=kind)
    return {name: model.train() for name, model in made.items()}


def measure(shape: Shape, dtype: torch.dtype, rounds: int) -> dict[str, dict[str, list[float]]]:
    """contestant -> "forward", "both" -> tokens per CPU second of each round."""
    models = contestants(shape, dtype)
    ids = torch.randint(shape.vocab_size, (shape.rows, shape.seq_len), generator=torch.Generator().manual_seed(1))
    check(models, ids, dtype)
    found: dict[str, dict[str, list[float]]] = {name: {"forward": [], "both": []} for name in models}
    for turn in range(rounds + 1):  # the first warms up
        for name, model in models.items():
            forward, both = step(model, ids)
            if turn:
                found[name]["forward"].append(ids.numel() / forward)
                found[name]["both"].append(ids.numel() / both)
    return found


@torch.no_grad()
def check(models: dict[str, nn.Module], ids: Tensor, dtype: torch.dtype) -> None:
    """Raise AssertionError if a contestant computes something else."""
    expected = models["grouped_mm"](ids).logits.float()
    limit = {torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype] * expected.abs().max()
    for name, model in models.items():
        worst = (model(ids).logits.float() - expected).abs().max()
        # A token whose choice is a tie may go elsewhere in bf16: the bulk must agree.
        typical = (model(ids).logits.float() - expected).abs().mean()
        assert worst < limit or (dtype == torch.bfloat16 and typical < limit / 10), (name, worst, typical)


def step(model: nn.Module, ids: Tensor) -> tuple[float, float]:
    """CPU seconds of the forward, and of forward and backward."""
    model.zero_grad(set_to_none=True)
    began = time.process_time()
    loss = model(ids, labels=ids).loss
    middle = time.process_time()
    loss.backward()
    return middle - began, time.process_time() - began


def ratios(found: dict[str, dict[str, list[float]]], what: str) -> dict[str, float]:
    """Median over rounds of speed over the best of transformers' own."""
    best = [max(values) for values in zip(*(found[name][what] for name in THEIRS), strict=True)]
    return {
        name: statistics.median(own / other for own, other in zip(speeds[what], best, strict=True))
        for name, speeds in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--experts", type=int, default=Shape().experts)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a tiny shape, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tune_allocator()
    shape = QUICK if args.quick else Shape(experts=args.experts)
    found = measure(shape, DTYPES[args.dtype], 1 if args.quick else args.rounds)
    by_forward, by_both = ratios(found, "forward"), ratios(found, "both")
    print(f"{args.dtype}, {shape.experts} experts, {shape.rows} x {shape.seq_len} tokens; tokens per CPU second\n")
    print("| contestant | forward | ratio | forward and backward | ratio |\n|---|---|---|---|---|")
    for name, speeds in found.items():
        medians = {what: statistics.median(values) for what, values in speeds.items()}
        print(
            f"| `{name}` | {medians['forward']:,.0f} | {by_forward[name]:.2f} | {medians['both']:,.0f} | "
            f"{by_both[name]:.2f} |"
        )
    if args.json:
        args.json.write_text(json.dumps({"shape": shape._asdict(), "dtype": args.dtype, "found": found}, indent=2))


if __name__ == "__main__":
    main()
