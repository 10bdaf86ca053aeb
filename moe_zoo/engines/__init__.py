"""Who owns gradients, shards and the optimizer: DeepSpeed (ZeRO 0 to 3) and torch's FSDP2 behind one class."""

import sys
from importlib.util import find_spec

from moe_zoo.comm.mesh import Mesh
from moe_zoo.engines.base import Engine, Shard, StepStats
from moe_zoo.engines.batch import MicroBatch
from moe_zoo.parallel.build import PlacedModel
from moe_zoo.spec.errors import PlanError
from moe_zoo.spec.recipe import Recipe

__all__ = ["Engine", "MicroBatch", "Shard", "StepStats", "engine_name", "make_engine"]


def engine_name(recipe: Recipe) -> str:
    """The engine a recipe gets here: ``auto`` is DeepSpeed where it is installed, else FSDP2."""
    wanted, zero = recipe.parallel.engine, recipe.parallel.zero_stage
    name = wanted if wanted != "auto" else "deepspeed" if find_spec("deepspeed") else "fsdp"
    if name == "deepspeed" and not find_spec("deepspeed"):
        raise PlanError(
            f"parallel.engine: deepspeed; it is not installed on this {sys.platform} machine; set it to fsdp"
        )
    if name == "fsdp" and zero < 2:
        raise PlanError(f"parallel.zero_stage: {zero}; engine fsdp shards at stages 2 and 3; set one of them")
    if recipe.parallel.offload != "none" and (name == "fsdp" or zero == 0):
        raise PlanError(
            f"parallel.offload: {recipe.parallel.offload}; engine deepspeed offloads at stages 1 to 3, this is {name} at "
            f"stage {zero}; set parallel.offload to none, or those"
        )
    if (
        recipe.parallel.reduce == "micro_batch"
        and name == "deepspeed"
        and (zero < 3 or recipe.parallel.offload != "none")
    ):
        raise PlanError(
            f"parallel.reduce: micro_batch; engine deepspeed does so at stage 3 without offload, this is stage {zero} with "
            f"offload {recipe.parallel.offload}; set parallel.reduce to step"
        )
    if name == "deepspeed" and zero < 2 and recipe.precision.compute == "bf16":
        raise PlanError(
            f"parallel.zero_stage: {zero}; DeepSpeed keeps fp32 gradients of a bf16 model at stages 2 and 3 only; "
            f"set one of them"
        )
    return name


def make_engine(placed: PlacedModel, mesh: Mesh, recipe: Recipe) -> Engine:
    """Hand the model over to the engine of the recipe."""
    if engine_name(recipe) == "deepspeed":
        from moe_zoo.engines.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(placed, mesh, recipe)
    from moe_zoo.engines.fsdp import FSDPEngine

    return FSDPEngine(placed, mesh, recipe)
