"""The expert layer, forward and backward: ours beside the alternatives, as a share of the dense-GEMM limit.

    OMP_NUM_THREADS=1 python -m benchmarks.experts [--dtype bf16] [--json out.json]

One thread, process CPU seconds (a shared machine's wall clock says little), median of five. The limit is six dense
matrix products of the same FLOPs. ``indexed`` is the loop over ``weight[e]`` that transformers calls eager.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_zoo.comm.processes import tune_allocator
from moe_zoo.ops.experts import LoopedExperts, Stacks, Unit, _grouped_experts

TOKENS, WIDTH, REPEATS = 4096, 512, 5
SWIGLU = Unit("silu", gated=True)
SHAPES = ((8, 1024, 2), (32, 256, 8), (128, 256, 8))  # experts, expert width, choices


def indexed(x: Tensor, chosen: Tensor, weights: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """The loop most code has: its backward fills a whole zero gradient for each expert."""
    out = torch.zeros_like(x)
    for e in range(len(w_up)):
        token, slot = (chosen == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ w_up[e]).chunk(2, -1)
        out.index_add_(0, token, (F.silu(gate) * up) @ w_down[e] * weights[token, slot, None].to(x.dtype))
    return out


PATHS: dict[str, Callable[..., Tensor]] = {
    "ours": lambda x, chosen, weights, *stacks: LoopedExperts.apply(x, chosen, weights, SWIGLU, *stacks, None, None),
    "grouped_mm": lambda x, chosen, weights, *stacks: _grouped_experts(x, chosen, weights, Stacks(*stacks), SWIGLU),
    "indexed": indexed,
}


def measure(tokens: int, experts: int, d_ff: int, top_k: int, dtype: torch.dtype) -> dict[str, float]:
    """Share of the limit for each path."""
    torch.manual_seed(0)
    x, w_up, w_down = (
        torch.randn(*shape).mul_(0.05).to(dtype).requires_grad_()
        for shape in ((tokens, WIDTH), (experts, WIDTH, 2 * d_ff), (experts, d_ff, WIDTH))
    )
    weights, chosen = torch.randn(tokens, experts).softmax(-1).topk(top_k)
    grad = torch.randn(tokens, WIDTH).to(dtype)
    leaves = (x, chosen, weights.requires_grad_(), w_up, w_down)
    limit = cpu_seconds(lambda: dense(tokens * top_k, d_ff, dtype))
    return {name: limit / cpu_seconds(lambda p=path: p(*leaves).backward(grad)) for name, path in PATHS.items()}


def dense(rows: int, d_ff: int, dtype: torch.dtype, _cache: dict = {}) -> None:  # noqa: B006 the operands are reused
    """Three products forward, their two gradients each, on one block."""
    key = (rows, d_ff, dtype)
    if key not in _cache:
        shapes = ((rows, WIDTH), (rows, d_ff), (rows, 2 * d_ff), (WIDTH, 2 * d_ff), (d_ff, WIDTH))
        _cache[key] = [torch.randn(*shape).to(dtype) for shape in shapes]
    a, b, wide, up, down = _cache[key]
    _ = (a @ up, b @ down, a @ down.t(), b.t() @ a, a.t() @ wide, wide @ up.t())


def cpu_seconds(step: Callable[[], object]) -> float:
    """Median process CPU time after one warm-up."""
    step()
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        step()
        times.append(time.process_time() - began)
    return statistics.median(times)


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--quick", action="store_true", help="few tokens: that it runs, not how fast")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tune_allocator()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    rows = []
    print(f"{args.dtype}, share of the dense limit".ljust(34), *(name.rjust(11) for name in PATHS))
    for experts, d_ff, top_k in SHAPES:
        shares = measure(64 if args.quick else TOKENS, experts, d_ff, top_k, dtype)
        rows.append({"experts": experts, "d_ff": d_ff, "top_k": top_k, "dtype": args.dtype, **shares})
        label = f"{experts} experts of {d_ff}, top-{top_k}"
        print(label.ljust(34), *(f"{share:11.2f}" for share in shares.values()))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
