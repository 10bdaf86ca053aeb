"""Which engine a recipe gets, and what no engine can do: told before any process starts. No torch."""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec

from moe_zoo.spec.errors import PlanError
from moe_zoo.spec.recipe import Parallel, Recipe


def engine_name(recipe: Recipe) -> str:
    """The engine a recipe gets here: ``auto`` is DeepSpeed where it is installed, else FSDP2."""
    wanted = recipe.parallel.engine
    name = wanted if wanted != "auto" else "deepspeed" if find_spec("deepspeed") else "fsdp"
    if name == "deepspeed" and not find_spec("deepspeed"):
        raise PlanError(
            f"parallel.engine: deepspeed; it is not installed on this {sys.platform} machine; set it to fsdp"
        )
    for problem in (*_stage_problems(recipe, name), *_offload_problems(recipe, name)):
        raise PlanError(problem)
    return name


def _stage_problems(recipe: Recipe, name: str) -> Iterator[str]:
    zero, parallel = recipe.parallel.zero_stage, recipe.parallel
    if name == "fsdp" and zero < 2:
        yield f"parallel.zero_stage: {zero}; engine fsdp shards at stages 2 and 3; set one of them"
    if name == "deepspeed" and zero < 2 and recipe.precision.compute == "bf16":
        yield (
            f"parallel.zero_stage: {zero}; DeepSpeed keeps fp32 gradients of a bf16 model at stages 2 and 3 only; "
            f"set one of them"
        )
    if name == "deepspeed" and parallel.reduce == "micro_batch" and (zero < 3 or parallel.offload != "none"):
        yield (
            f"parallel.reduce: micro_batch; engine deepspeed does so at ZeRO stage 3 without offload, this is stage {zero} "
            f"with offload {parallel.offload}; set parallel.reduce to step"
        )


def _offload_problems(recipe: Recipe, name: str) -> Iterator[str]:
    parallel: Parallel = recipe.parallel
    offload, nvme = parallel.offload, parallel.nvme
    if nvme and offload == "none":
        yield f"parallel.nvme: {nvme}; nothing is offloaded there; set parallel.offload to optimizer or all"
    if offload != "none" and name != "deepspeed":
        yield f"parallel.offload: {offload}; engine deepspeed offloads, this is {name}; set parallel.engine to deepspeed"
    least = 3 if nvme or offload == "all" else 1
    if offload != "none" and parallel.zero_stage < least:
        where = " to a disk" if nvme else ""
        yield (
            f"parallel.offload: {offload}; DeepSpeed does so{where} from ZeRO stage {least} on, this is stage "
            f"{parallel.zero_stage}; set parallel.zero_stage to 3"
        )
    if nvme and (parallel.replicate > 1 or (parallel.pp > 1 and recipe.model.tie_embeddings)):
        yield (
            f"parallel.nvme: {nvme}; gradients on a disk cannot be summed across pods or with the other end of a tied "
            f"pipeline; set parallel.nvme to null"
        )
    if nvme and recipe.precision.compute == "bf16":
        yield (
            f"parallel.nvme: {nvme}; DeepSpeed makes its master weights of rounded ones, which cannot be put right on a disk; "
            f"set precision.compute to fp32, or parallel.nvme to null"
        )
    if nvme and not os.access(nvme, os.W_OK | os.X_OK):
        yield f"parallel.nvme: {nvme}; must be a folder on this machine that a process may write to; make it"
