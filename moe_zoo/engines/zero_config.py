"""What DeepSpeed is told: its configuration, and the groups it may know of."""

from typing import Any

from moe_zoo.comm.mesh import Mesh
from moe_zoo.spec.recipe import Recipe


def zero_config(recipe: Recipe, largest: int) -> dict[str, Any]:
    """The configuration of a recipe; ``largest`` is the number of elements of the largest local tensor."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # micro-batches are ours: DeepSpeed sees one step
        # ZeRO 0 clips only if asked to, and our norm must be taken every time.
        "gradient_clipping": recipe.optim.clip or 1e30,
        "zero_optimization": _zero(recipe, largest),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if recipe.precision.compute == "bf16":
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = recipe.precision.reduce
    return config


def _zero(recipe: Recipe, largest: int) -> dict[str, Any]:
    offload, nvme = recipe.parallel.offload, recipe.parallel.nvme
    zero = {
        "stage": recipe.parallel.zero_stage,
        "overlap_comm": False,
        "reduce_bucket_size": max(largest, 1_000_000),  # elements; ZeRO-3 allocates a buffer of this size
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
    }
    place = {"device": "cpu"} if nvme is None else {"device": "nvme", "nvme_path": nvme}
    if offload != "none":
        zero["offload_optimizer"] = place
    if offload == "all":
        zero["offload_param"] = place
    return zero


class Mpu:
    """What DeepSpeed asks of a model-parallel unit: its data-parallel world is the pod, nothing else is split."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh

    def get_data_parallel_group(self):
        return self.mesh.pod_group

    def get_data_parallel_world_size(self):
        return self.mesh.layout.pod_size

    def get_data_parallel_rank(self):
        return self.mesh.pod_rank

    def get_model_parallel_group(self):
        return self.mesh.pp_group

    def get_model_parallel_world_size(self):
        return self.mesh.pp

    def get_model_parallel_rank(self):
        return self.mesh.pp_rank

    def get_tensor_model_parallel_world_size(self):
        return 1

    def get_tensor_model_parallel_rank(self):
        return 0
