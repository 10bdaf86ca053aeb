"""The world this process was started into: read from the environment, checked against what the launcher meant.

``World`` and its checks import no torch, so that a refused launch costs nothing; the process group does.
"""

import logging
import os
import shlex
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, NoReturn

from moe_zoo.comm.ancestors import processes_asked_of_accelerate
from moe_zoo.spec.errors import PlanError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STORE_FD = "MOE_ZOO_STORE_FD"  # rank 0 inherits the bound socket of the store from start_processes
LAUNCHED_BY_US = "MOE_ZOO_LAUNCHED"

Launcher = Literal["none", "moe-zoo", "torchrun", "accelerate"]


@dataclass(frozen=True)
class World:
    """Which of how many processes this is, and who started it."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    ranks_per_node: int = 1
    launcher: Launcher = "none"

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def read_world() -> World:
    """The world the environment describes; one process where it describes none."""
    found = [name for name in RANK_VARIABLES if name in os.environ]
    if "RANK" not in found and "WORLD_SIZE" not in found:
        return World(launcher=_launcher())
    missing = [name for name in RANK_VARIABLES if name not in found]
    if missing:
        raise PlanError(
            f"environment: {', '.join(found)} without {', '.join(missing)}; a launcher sets them all; start with "
            f"torchrun or accelerate launch, or unset {' '.join(found)} to run one process"
        )
    rank, world, local_rank, ranks_per_node = (_number(name) for name in RANK_VARIABLES[:4])
    return World(rank, world, local_rank, ranks_per_node, _launcher())


def check_world(world: World, expected: int | None = None) -> None:
    """Refuse to train alone, or as many, where another number was meant. ``expected`` is the recipe's."""
    asked = processes_asked_of_accelerate() if world.launcher == "accelerate" else None
    if "RANK" not in os.environ and asked and asked > 1:
        raise PlanError(
            f"launch: 1 process; accelerate was asked for {asked} and started 1, as it does with --cpu, MULTI_CPU or "
            f"NO; run {_accelerate_command(asked)} (--multi_gpu needs no GPU)"
        )
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        if "RANK" not in os.environ and int(os.environ.get(name) or 1) > 1:
            raise PlanError(
                f"launch: {name}={os.environ[name]} and no RANK; each of these processes would train alone; "
                f"start one torchrun per node and let it start the ranks"
            )
    if expected and expected != world.world:
        raise PlanError(
            f"expect.world: {expected}; {world.world} {'process was' if world.world == 1 else 'processes were'} "
            f"started; run {_command(world, expected)}, or set expect=null"
        )


def init_process_group(world: World, timeout_s: float = 1800.0) -> "torch.device":
    """Join the world and return this rank's device. gloo on CPU, nccl for CUDA tensors; a group that exists is kept."""
    import torch
    import torch.distributed as dist

    device = _device(world)
    _set_threads(world)
    os.environ.setdefault("LOCAL_SIZE", str(world.ranks_per_node))  # else DeepSpeed runs numactl at each reduction
    if dist.is_initialized():
        return device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=_store(world, timeout),
        rank=world.rank,
        world_size=world.world,
        timeout=timeout,
    )
    return device


def destroy() -> bool:
    """Leave the world, and say whether there was one."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return False
    dist.destroy_process_group()
    return True


def leave(code: int | str | None) -> NoReturn:
    """End a rank at once, its output written.

    A group that something still refers to keeps its threads beyond ``destroy``; an interpreter that shuts down under
    them aborts now and then ("terminate called without an active exception"), after all work was done.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _launcher() -> Launcher:
    if LAUNCHED_BY_US in os.environ:
        return "moe-zoo"
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # accelerate launch always sets it
        return "accelerate"
    return "torchrun" if "RANK" in os.environ else "none"


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise PlanError(f"environment: {name}={os.environ[name]!r}; must be a whole number; unset it") from None


def _command(world: World, processes: int) -> str:
    if world.launcher == "accelerate":
        return _accelerate_command(processes)
    if world.launcher == "torchrun":
        return f"torchrun --nproc-per-node {processes} {shlex.join(sys.orig_argv[1:])}"
    words = ["train", *(word for word in sys.argv[1:] if word != "train")]
    return f"moe-zoo {shlex.join(words)} --processes {processes}"


def _accelerate_command(processes: int) -> str:
    kind = "--multi_gpu " if processes > 1 else ""
    return f"accelerate launch {kind}--num_processes {processes} {shlex.join(sys.orig_argv[1:])}"


def _device(world: World) -> "torch.device":
    import torch

    wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    if wants_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    if world.local_rank >= torch.cuda.device_count():
        raise PlanError(
            f"launch: rank {world.rank} is process {world.local_rank} of its node, which has "
            f"{torch.cuda.device_count()} GPUs; each needs one; start fewer, or set ACCELERATE_USE_CPU=true"
        )
    return torch.device("cuda", world.local_rank)


def _set_threads(world: World) -> None:
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // world.ranks_per_node))


def _store(world: World, timeout: timedelta) -> "Store":
    """Where the ranks find each other.

    The store of torchrun outlives a restart of the ranks and keeps the dead ones' addresses: each attempt gets
    keys of its own.
    """
    import torch.distributed as dist

    if "RANK" not in os.environ:
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it even of a process alone
        return dist.HashStore()
    if STORE_FD in os.environ and world.is_main:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        listen_fd = int(os.environ[STORE_FD])
        store: Store = dist.TCPStore(address, port, world.world, True, timeout, master_listen_fd=listen_fd)
    else:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    return dist.PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
