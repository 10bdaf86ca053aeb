"""torch FSDP2 under any layout: gradients are summed over the replica group, nothing is averaged.

``zero_stage`` 3 frees a block's weights after its forward, unless ``parallel.gather`` is ``step``; 2 keeps them until
its backward.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage

from moe_zoo.comm.collectives import sum_over
from moe_zoo.comm.mesh import Mesh
from moe_zoo.engines.base import STATE_KEYS, Engine, FetchState, Shard
from moe_zoo.engines.batch import MicroBatch
from moe_zoo.engines.optimizer import make_adamw
from moe_zoo.models.decoder import DecoderOutput
from moe_zoo.parallel.build import PlacedModel
from moe_zoo.spec.recipe import Recipe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class FSDPEngine(Engine):
    """``fully_shard`` over the replica group of each module's own parameters."""

    def __init__(self, placed: PlacedModel, mesh: Mesh, recipe: Recipe):
        super().__init__(placed, mesh, recipe)
        self._shard()
        # torch's pipelining drives FSDP modules itself, and reduces once at the end.
        self.reduces_often = recipe.parallel.reduce == "micro_batch"
        self._build_pipeline(
            wrap=self._shard_whole,
            call=None,
            splits_backward=not self.reduces_often,  # reducing frees weights that a later half of a backward asks for
            after_backward=_reduce_stage if self.reduces_often else None,
        )
        self.named = self.module.global_names(self.module.named_parameters())  # now DTensors
        self.optimizer = make_adamw(self.named, self.placements, recipe.optim)

    def forward(self, micro: MicroBatch) -> DecoderOutput:
        return self._call(self.module, micro)

    def update(self, lr: float) -> float:
        grads = {name: param.grad.to_local() for name, param in self.named.items()}
        square = torch.stack([g.float().square().sum() for name, g in grads.items() if name not in self.copies]).sum()
        # Shards are disjoint over the ranks of a pod, and the same in each pod.
        norm = self._checked((sum_over(square, None) / self.mesh.layout.replicate).sqrt())
        if self.recipe.optim.clip:
            for grad in grads.values():
                grad.mul_((self.recipe.optim.clip / (norm + 1e-6)).clamp(max=1.0))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return float(norm)

    def gradient(self, name: str) -> Tensor:
        return self.named[name].grad.full_tensor()

    def weight(self, name: str) -> Tensor:
        return self.named[name].detach().full_tensor()

    def shards(self) -> list[Shard]:
        return [
            Shard(name, start, {key: values.view(-1) for key, values in self._local(name).items()})
            for name, start, length in self._runs()
            if length and self.mesh.pod == 0 and name not in self.copies
        ]

    def load(self, fetch: FetchState, num_steps: int) -> None:
        for param in self.named.values():
            state = {key: torch.zeros_like(param) for key in STATE_KEYS[1:]}
            self.optimizer.state[param] = {"step": torch.tensor(float(num_steps), device=self.mesh.device), **state}
        for name, start, length in self._runs():
            for key, values in self._local(name).items():
                if length:
                    values.copy_(fetch(name, key, start, length).view_as(values))

    @contextlib.contextmanager
    def _window(self) -> Iterator[None]:
        self.optimizer.zero_grad()
        yield
        self._sum_ends({name: [self.named[name].grad.to_local()] for name in self.ends})

    def _begin(self, is_last: bool) -> None:
        self.module.set_requires_gradient_sync(is_last or self.reduces_often)  # else earlier ones add up unreduced
        self.module.set_is_last_backward(is_last)

    def _shard(self) -> None:
        meshes = {kind: self._device_mesh(kind) for kind in self.mesh.replicas}
        precision = self.recipe.precision
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision.compute], reduce_dtype=DTYPES[precision.reduce])
        parallel = self.recipe.parallel
        # In a pipeline a block freed after its forward would leave a split backward without gradient.
        frees = parallel.zero_stage == 3 and parallel.gather == "layer" and self.mesh.pp == 1
        options = {"reshard_after_forward": frees, "mp_policy": policy}
        kinds = self._kinds()
        for stage in self.module.stages.values():
            for block in stage.layers.values():
                self._shard_slices(list(block.modules()), kinds, meshes, options)
                fully_shard(block, mesh=meshes["stage"], **options)
            outside = [m for name, m in stage.named_modules() if not name.startswith("layers.")]
            self._shard_slices(outside, kinds, meshes, options)
        self.whole = {"mesh": meshes["stage"], "mp_policy": policy, "reshard_after_forward": False}
        if self.mesh.pp == 1:
            self._shard_whole(self.module)

    def _device_mesh(self, kind: str) -> DeviceMesh:
        """Shards over the replica group; with pods, a first dimension over which shards are summed."""
        group, device = self.mesh.replicas[kind], self.mesh.device.type
        if self.mesh.layout.replicate == 1:
            return DeviceMesh.from_group(group, device, mesh_dim_names=(kind,))
        ranks = [None] * self.mesh.layout.replicate
        dist.all_gather_object(ranks, dist.get_process_group_ranks(group), group=self.mesh.across_pods)
        names = ("pods", kind)
        return DeviceMesh.from_group([self.mesh.across_pods, group], device, mesh=ranks, mesh_dim_names=names)

    def _kinds(self) -> dict[nn.Module, str]:
        """The kind of each module that owns slices."""
        kind_of = {id(param): self.placements[name].kind for name, param in self.named.items()}
        found = {}
        for module in self.module.modules():
            kinds = {kind_of[id(param)] for param in module.parameters(recurse=False)}
            assert len(kinds) < 2, "a module's own parameters share a replica group"
            if kinds - {"stage"}:
                found[module] = kinds.pop()
        return found

    def _shard_slices(
        self, modules: list[nn.Module], kinds: dict[nn.Module, str], meshes: dict[str, DeviceMesh], options: dict
    ) -> None:
        """One collective for all slices of a kind."""
        for kind in sorted(meshes.keys() - {"stage"}):  # in one order on all ranks
            if own := [module for module in modules if kinds.get(module) == kind]:
                fully_shard(own, mesh=meshes[kind], **options)

    def _shard_whole(self, root: nn.Module) -> nn.Module:
        """What the blocks and experts have left over, and sums instead of means everywhere below."""
        fully_shard(root, **self.whole)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # else gloo is asked for PREMUL_SUM and refuses
        return root

    def _runs(self) -> Iterator[tuple[str, int, int]]:
        """(name, first element in the slice, elements) of each local shard: a chunk along dimension 0."""
        for name, param in self.named.items():
            group = self.mesh.replicas[self.placements[name].kind]
            chunk = -(-param.shape[0] // dist.get_world_size(group))
            row = min(dist.get_rank(group) * chunk, param.shape[0])
            width = param.numel() // param.shape[0]
            yield name, row * width, param.to_local().numel()

    def _local(self, name: str) -> dict[str, Tensor]:
        param = self.named[name]
        moments = {key: self.optimizer.state[param][key].to_local() for key in STATE_KEYS[1:]}
        return {"weight": param.detach().to_local(), **moments}


def _reduce_stage(stage: PipelineStage) -> None:
    """What torch does at the end of a schedule; gradients add up in the shards."""
    stage.perform_reduce_grad(1)
