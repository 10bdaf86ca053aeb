"""Load a checkpoint of 128 experts x 8 layers, about a gigabyte: ours beside transformers, and in too little memory.

    OMP_NUM_THREADS=1 python -m benchmarks.load [--rounds 5] [--json out.json]

Contestants load the same bf16 files, in processes of their own that take turns; time is that of the call alone, memory
the process's peak less what it had before the call. Each prints the sum of a weight, which must agree.

The second table gives a process a quarter of the checkpoint's size as private memory (RLIMIT_DATA, beyond what it has
after its imports) and lets it read one rank's slices of an expert-parallel layout; transformers, which has no slices,
gets the same limit for the whole.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

SHARD_SIZE, RANKS = "40MB", 32
LAST = "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"


class Shape(NamedTuple):
    """Of the checkpoint."""

    vocab_size: int = 8192
    width: int = 512
    layers: int = 8
    experts: int = 128
    expert_width: int = 256


QUICK = Shape(vocab_size=64, width=32, layers=2, experts=32, expert_width=16)


def write(shape: Shape, folder: Path) -> int:
    """A checkpoint as published ones are: bf16, sharded, each expert by itself. Its bytes."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=max(8, shape.width // 8),
        num_experts=shape.experts,
        num_experts_per_tok=4,
        moe_intermediate_size=shape.expert_width,
        dtype="bfloat16",
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size=SHARD_SIZE)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def load_ours(folder: str) -> Any:
    import moe_zoo

    return moe_zoo.load(folder, dtype="auto").model.layers["0"].feed_forward.experts.w_down


def load_theirs(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").model.layers[0].mlp.experts.down_proj


def load_slices(folder: str) -> Any:
    """What rank 0 of 32 holds, by the code of training under torch's fake process group."""
    import torch

    from moe_zoo.certify.problem import layout_of
    from moe_zoo.comm.mesh import Mesh
    from moe_zoo.models.source import Source
    from moe_zoo.parallel.build import build_model
    from moe_zoo.spec.recipe import Recipe

    source = Source(folder)
    recipe = Recipe.from_dict(
        {
            "name": "load",
            "model": source.architecture.to_dict(),
            "data": {"path": "none", "tokenizer": "none", "seq_len": 16},
            "train": {"steps": 1, "global_batch": RANKS},
            "optim": {"lr": 1e-3},
            "parallel": {"ep": RANKS, "zero_stage": 2},
        }
    )
    mesh = Mesh(layout_of(recipe, RANKS), torch.device("cpu"), 60)
    stage = build_model(recipe, mesh, 0, source).module.stages["0"]
    return stage.layers["0"].feed_forward.experts.w_down


CALLS = {"ours": load_ours, "transformers": load_theirs, "ours, a slice": load_slices}


def imports(call: str) -> None:
    """What a process has in memory before it loads anything."""
    import torch
    import torch.distributed as dist
    import transformers.models.qwen3_moe.modeling_qwen3_moe

    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    if call == "ours, a slice":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)


def child(call: str, folder: str, quota: int) -> None:
    """In a process of its own: load once, print what it took."""
    imports(call)
    private, before = _status("VmData"), _status("VmRSS")
    if quota:
        resource.setrlimit(resource.RLIMIT_DATA, (private + quota, private + quota))
    began, cpu = time.monotonic(), time.process_time()
    try:
        weight = CALLS[call](folder)
    except (MemoryError, RuntimeError, OSError) as error:
        print(json.dumps({"failed": " ".join(str(error).split())[:100] or type(error).__name__}))
        return
    found = {"seconds": time.monotonic() - began, "cpu": time.process_time() - cpu, "peak": _status("VmHWM") - before}
    print(json.dumps(found | {"sum": weight[0].double().sum().item()}))


def _status(key: str) -> int:
    """Bytes, from /proc/self/status."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


def run(call: str, folder: Path, quota: int = 0) -> dict[str, Any]:
    """What a child found."""
    words = [sys.executable, "-m", "benchmarks.load", "--child", call, str(folder), str(quota)]
    done = subprocess.run(words, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": f"ended with {done.returncode}"}
    return json.loads(lines[-1])


def main() -> None:
    if len(sys.argv) == 5 and sys.argv[1] == "--child":
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tiny checkpoint, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write(QUICK if args.quick else Shape(), folder)
        names = ("ours", "transformers")
        rounds = [{call: run(call, folder) for call in names} for _ in range(1 if args.quick else args.rounds)]
        quota = size // 4 if not args.quick else 64 * 2**20
        limited = {call: run(call, folder, quota) for call in ("ours, a slice", "transformers")}
    sums = {round(found["sum"], 6) for turn in rounds for found in turn.values()}
    assert len(sums) == 1, sums
    print(f"checkpoint of {size / 2**20:,.0f} MiB\n")
    print("| contestant | seconds | CPU seconds | peak MiB beyond imports |\n|---|---|---|---|")
    for call in names:
        seconds, cpu, peak = (
            statistics.median(turn[call][key] for turn in rounds) for key in ("seconds", "cpu", "peak")
        )
        print(f"| `{call}` | {seconds:.2f} | {cpu:.2f} | {peak / 2**20:,.0f} |")
    ratio = statistics.median(turn["transformers"]["seconds"] / turn["ours"]["seconds"] for turn in rounds)
    print(f"\ntransformers takes {ratio:.2f} times as long (median over rounds)\n")
    print(f"with {quota / 2**20:,.0f} MiB of private memory beyond imports:")
    for call, found in limited.items():
        print(
            f"  {call}: {found.get('failed') or 'loaded, peak ' + format(found['peak'] / 2**20, ',.0f') + ' MiB of all memory'}"
        )
    if args.json:
        args.json.write_text(
            json.dumps({"bytes": size, "rounds": rounds, "quota": quota, "limited": limited}, indent=2)
        )


if __name__ == "__main__":
    main()
