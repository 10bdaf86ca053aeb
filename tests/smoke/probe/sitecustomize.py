"""Put on PYTHONPATH, this replaces the trainer by one that tells which world it found. Launch tests use it."""

import sys
import types


def train(recipe, world):
    """Join, add up one per rank, and write what was seen to ``log.folder``; ``name`` chooses how to misbehave."""
    import json
    import os
    import signal
    import time
    from dataclasses import asdict
    from pathlib import Path

    import torch
    import torch.distributed as dist

    from moe_zoo.comm.launch import init_process_group
    from moe_zoo.spec.errors import PlanError

    folder = Path(recipe.log.folder)
    folder.mkdir(parents=True, exist_ok=True)
    if recipe.name == "all-fail":
        raise PlanError("probe: every rank; refuses alike; nothing to do")
    device = init_process_group(world, timeout_s=60)
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    seen = asdict(world) | {"sum": int(total), "backend": dist.get_backend(), "threads": torch.get_num_threads()}
    if recipe.name == "last-fails" and world.rank == world.world - 1:
        raise PlanError("probe: the last rank; refuses alone; nothing to do")
    if recipe.name == "restarts" and world.rank == 1 and not int(os.environ["TORCHELASTIC_RESTART_COUNT"]):
        os.kill(os.getpid(), signal.SIGKILL)
    if recipe.name in ("waits", "last-fails"):
        stopped = []
        signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
        signal.signal(signal.SIGINT, lambda number, frame: stopped.append(number))
        (folder / f"{world.rank}.ready").write_text(str(os.getpid()))
        deadline = time.monotonic() + 60
        while not stopped and time.monotonic() < deadline:
            time.sleep(0.02)
        seen["stopped"] = stopped
    (folder / f"{world.rank}.json").write_text(json.dumps(seen))


trainer = types.ModuleType("moe_zoo.train.trainer")
trainer.train = train
package = types.ModuleType("moe_zoo.train")
package.__path__ = []
sys.modules |= {"moe_zoo.train": package, "moe_zoo.train.trainer": trainer}
