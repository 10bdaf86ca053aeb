"""One optimizer step of a Qwen3-MoE model on two ranks: ours beside DeepSpeed AutoEP and transformers' own way.

    OMP_NUM_THREADS=1 python -m benchmarks.step_time [--experts 128] [--rounds 9] [--only NAME ...] [--json out.json]

Same weights, same batches, fp32, gloo, AdamW (fused) with clipping, ZeRO-3, experts spread over both ranks where the
contestant can. Every contestant has two processes of its own that wait while others step; a round is one step of each,
in turns. A ratio is the median over rounds of (its time / that of our first in the same round), so that the load of a
shared machine falls on all alike. CPU is what both ranks computed, whatever they waited for.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks import contestants
from benchmarks.contestants import Contestant
from benchmarks.qwen3_moe import Shape, save_checkpoint
from moe_zoo.comm.processes import tune_allocator

RACE: dict[str, type[Contestant]] = {
    "ours-deepspeed": contestants.Ours,
    "ours-gather-step": contestants.OursGatheredOnce,
    "ours-fsdp": contestants.OursFSDP,
    "autoep": contestants.AutoEP,
    "transformers-ep": contestants.Transformers,
    "zero3-no-ep": contestants.PlainZeRO3,
}
WORLD, WARM_UP = 2, 2
QUICK = Shape(64, 32, 1, 4, 2, 8, 4, 16, 2, rows=2, seq_len=16)
LOSS_TOLERANCE = 1e-4  # nats, of the first step
HEAVY = ["benchmarks.contestants", "moe_zoo.engines.deepspeed", "moe_zoo.engines.fsdp", "moe_zoo.parallel.build"]
HEAVY += ["transformers.models.qwen3_moe.modeling_qwen3_moe", "transformers.distributed"]


class Step(NamedTuple):
    loss: float
    wall_s: float  # of the slower rank
    cpu_s: float  # of both


class Team:
    """The processes of one contestant."""

    def __init__(self, name: str, shape: Shape, folder: Path):
        self.name, self.steps, self.error = name, [], ""
        context = multiprocessing.get_context("forkserver")  # imports happen once
        context.set_forkserver_preload(HEAVY)
        self.pipes, self.ranks = [], []
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            self.ranks.append(context.Process(target=rank_main, args=(rank, name, shape, folder, theirs), daemon=True))
            self.ranks[-1].start()
            theirs.close()
            self.pipes.append(ours)
        self._receive()

    def step(self, index: int) -> None:
        """One step on batch ``index``; after a failure none."""
        if not self.error:
            for pipe in self.pipes:
                pipe.send(index)
            if answers := self._receive():
                losses, walls, cpus = zip(*answers, strict=True)
                self.steps.append(Step(losses[0], max(walls), sum(cpus)))

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.join()

    def _receive(self) -> list[tuple[float, float, float]]:
        answers = []
        for pipe in self.pipes:
            answer = pipe.recv()
            if isinstance(answer, str):
                print(f"{self.name}:\n{answer}", file=sys.stderr)
                self.error = answer.strip().splitlines()[-1]
                self.end()  # the other rank may wait in a collective
                return []
            answers.append(answer)
        return answers


def rank_main(rank: int, name: str, shape: Shape, folder: Path, pipe: Connection) -> None:
    """Build, say so, then step whenever an index comes. What went wrong is sent as text."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_SIZE=str(WORLD))
    torch.set_num_threads(1)
    tune_allocator()  # for all contestants: worth as much to each
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=WORLD)
        contestant = RACE[name](shape, folder)
        pipe.send((0.0, 0.0, 0.0))
        while True:
            generator = torch.Generator().manual_seed(pipe.recv())
            tokens = torch.randint(shape.vocab_size, (shape.rows, shape.seq_len + 1), generator=generator)
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            loss = contestant.step(tokens)
            pipe.send((loss, time.perf_counter() - wall, time.process_time() - cpu))
    except BaseException:
        pipe.send(traceback.format_exc())


def summary(team: Team, first: Team, shape: Shape) -> dict:
    """Figures of one contestant; ratios to ``first``."""
    if team.error:
        return {"name": team.name, "error": team.error}
    steps, reference = team.steps[WARM_UP:], first.steps[WARM_UP:]
    walls = sorted(step.wall_s for step in steps)
    wall = statistics.median(walls)
    pairs = list(zip(steps, reference, strict=True))
    return {
        "name": team.name,
        "ms": 1e3 * wall,
        "ms_least": 1e3 * walls[0],
        "ms_most": 1e3 * walls[-1],
        "tokens_per_s": shape.tokens / wall,
        "ratio": statistics.median(step.wall_s / other.wall_s for step, other in pairs),
        "cpu_ms": 1e3 * statistics.median(step.cpu_s for step in steps),
        "cpu_ratio": statistics.median(step.cpu_s / other.cpu_s for step, other in pairs),
        "first_loss": team.steps[0].loss,
    }


def race(names: list[str], shape: Shape, rounds: int) -> list[dict]:
    """Interleaved steps, and what they took."""
    with tempfile.TemporaryDirectory() as path:
        save_checkpoint(shape, Path(path))
        teams = [Team(name, shape, Path(path)) for name in names]
        for index in range(WARM_UP + rounds):
            turn = index % len(teams)
            for team in teams[turn:] + teams[:turn]:
                team.step(index)
        for team in teams:
            team.end()
    rows = [summary(team, teams[0], shape) for team in teams]
    for row in rows:
        if "error" not in row:
            assert abs(row["first_loss"] - rows[0]["first_loss"]) < LOSS_TOLERANCE, rows
    return rows


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="steps of each that count")
    parser.add_argument("--experts", type=int, default=Shape().num_experts, help="per layer")
    parser.add_argument("--only", nargs="+", choices=RACE, default=list(RACE), help="ratios are to the first")
    parser.add_argument("--quick", action="store_true", help="a toy model: that it runs, not how fast")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    shape, before = QUICK if args.quick else Shape(num_experts=args.experts), os.getloadavg()[0]
    rows = race(args.only, shape, rounds=1 if args.quick else args.rounds)
    when = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    load = f"load {before:.1f} before, {os.getloadavg()[0]:.1f} after"
    print(f"{when}, {os.cpu_count()} cores, {load}; {shape}")
    print(f"{'':18}{'ms':>8}{'least..most':>15}{'tok/s':>9}{'ratio':>7}{'CPU ms':>9}{'ratio':>7}{'first loss':>12}")
    for row in rows:
        if "error" in row:
            print(f"{row['name']:18} does not run: {row['error']}")
            continue
        spread = f"{row['ms_least']:.0f}..{row['ms_most']:.0f}"
        print(
            f"{row['name']:18}{row['ms']:8.0f}{spread:>15}{row['tokens_per_s']:9.0f}{row['ratio']:7.2f}"
            f"{row['cpu_ms']:9.0f}{row['cpu_ratio']:7.2f}{row['first_loss']:12.5f}"
        )
    if args.json:
        args.json.write_text(json.dumps({"when": when, "load": load, "shape": shape._asdict(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
