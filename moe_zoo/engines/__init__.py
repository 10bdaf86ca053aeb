"""Who owns gradients, shards and the optimizer: DeepSpeed (ZeRO 0 to 3) and torch's FSDP2 behind one class."""

from moe_zoo.comm.mesh import Mesh
from moe_zoo.engines.base import Engine, Shard, StepStats
from moe_zoo.engines.batch import MicroBatch
from moe_zoo.parallel.build import PlacedModel
from moe_zoo.spec.engine import engine_name
from moe_zoo.spec.recipe import Recipe

__all__ = ["Engine", "MicroBatch", "Shard", "StepStats", "make_engine"]


def make_engine(placed: PlacedModel, mesh: Mesh, recipe: Recipe) -> Engine:
    """Hand the model over to the engine of the recipe."""
    if engine_name(recipe) == "deepspeed":
        from moe_zoo.engines.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(placed, mesh, recipe)
    from moe_zoo.engines.fsdp import FSDPEngine

    return FSDPEngine(placed, mesh, recipe)
