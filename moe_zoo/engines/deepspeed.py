"""DeepSpeed ZeRO 0 to 3 under any layout.

DeepSpeed's own MoE refuses stage 3. Here every parameter that is not whole carries the tags by which ZeRO shards it
over its replica group, and DeepSpeed is told of one data-parallel group, all ranks of the pod. It divides every
gradient, tagged or not, by the size of that group: ``factor`` gives it back. It never learns of other pods: the sums
across them are ours.
"""

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE as DeepSpeedMoE
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.utils import groups as ds_groups
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from moe_zoo.comm.collectives import sum_over
from moe_zoo.comm.mesh import Mesh
from moe_zoo.engines.base import STATE_KEYS, Engine, FetchState, Shard
from moe_zoo.engines.batch import MicroBatch
from moe_zoo.engines.optimizer import make_adamw
from moe_zoo.engines.zero_config import Mpu, zero_config
from moe_zoo.models.decoder import DecoderOutput
from moe_zoo.parallel.build import PlacedModel
from moe_zoo.spec.errors import PlanError
from moe_zoo.spec.recipe import Recipe

MOMENTS = STATE_KEYS[1:]
# DeepSpeed calls collectives by their older names, and torch says so each time.
warnings.filterwarnings("ignore", message=r".*torch\.distributed\..* is deprecated", category=FutureWarning)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else its first use compiles a C++ extension


class Piece(NamedTuple):
    """A run of a parameter's local slice: ``length`` elements from ``start`` are ``values[offset:]`` of some buffer."""

    name: str
    start: int
    length: int
    offset: int


class DeepSpeedEngine(Engine):
    """One DeepSpeed engine per rank owns the whole module."""

    def __init__(self, placed: PlacedModel, mesh: Mesh, recipe: Recipe):
        super().__init__(placed, mesh, recipe)
        self.stage, self.factor = recipe.parallel.zero_stage, float(mesh.layout.pod_size)
        self.offloads = recipe.parallel.offload != "none"
        _check_nvme(recipe.parallel.nvme)
        self._tag()
        self.optimizer = make_adamw(self.named, self.placements, recipe.optim, alone=self.ends)
        for group in self.optimizer.param_groups:
            if group["kind"] != "stage":
                group["moe"], group["name"] = True, group["kind"]  # ZeRO 1 and 2 read these two
        is_narrow = recipe.precision.compute != "fp32"
        initial = {name: param.detach().clone().view(-1) for name, param in self.named.items() if is_narrow}
        self._initialize()
        self.zero = self.engine.optimizer
        is_offloaded = getattr(self.zero, "offload_optimizer", False) or getattr(self.zero, "cpu_offload", False)
        assert bool(is_offloaded) == self.offloads  # its own zero_cpu_offload() answers otherwise for some devices
        self.runner = self.engine if self.stage else self.engine.module  # at stage 0 it refuses a backward of ours
        keeps_weights = self.stage < 3 or recipe.parallel.gather == "step"
        self.reduces_often = recipe.parallel.reduce == "micro_batch"
        self._build_pipeline(
            wrap=lambda adapter: adapter,
            call=self.runner,
            splits_backward=keeps_weights,
            after_backward=lambda _: self._after_backward(),
        )
        if is_narrow:
            self._restore_bits(initial)

    def forward(self, micro: MicroBatch) -> DecoderOutput:
        return self._call(self.runner, micro)

    def update(self, lr: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    def gradient(self, name: str) -> Tensor:
        param = self.named[name]
        return param.grad if not self.stage else safe_get_full_grad(param)

    def weight(self, name: str) -> Tensor:
        param = self.named[name]
        return param.detach().float() if not self.stage else safe_get_full_fp32_param(param)

    # ------------------------------------------------------------------ construction

    def _tag(self) -> None:
        # ZeRO-3 flushes a bucket when the group changes, and then finds two names in it where two kinds share one.
        name_of = {id(group): kind for kind, group in self.mesh.replicas.items()}
        for kind, group in self.mesh.replicas.items():
            ds_groups._EXPERT_PARALLEL_GROUP[kind] = self.mesh.pod_group
            ds_groups._EXPERT_DATA_PARALLEL_GROUP[kind] = group
        for name, param in self.named.items():
            kind = self.placements[name].kind
            if kind != "stage":
                param.allreduce, param.group_name = False, kind  # read by ZeRO 0 to 2, the next three by ZeRO 3
                param.ds_zero_placement_family = "autoep_expert"
                param.ds_zero_partition_process_group = group = self.mesh.replicas[kind]
                param.ds_zero_partition_group_name = name_of[id(group)]

    def _initialize(self) -> None:
        has_slices = any(placement.kind != "stage" for placement in self.placements.values())
        if has_slices and self.stage < 3:
            self.module.deepspeed_marker = _moe_marker()
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        largest = max(placement.numel for placement in self.placements.values())
        self.engine, *_ = deepspeed.initialize(
            model=self.module, optimizer=self.optimizer, config=zero_config(self.recipe, largest), mpu=Mpu(self.mesh)
        )
        for name, buffer in self.module.named_buffers():  # a bf16 model keeps its router bias in fp32
            buffer.data = buffers[name].to(buffer.device)
        if self.stage == 3:
            self.engine.optimizer._get_norm_groups = lambda: [self._norm()]
            # Before each forward this hook would compare module traces by a broadcast over the world.
            self.engine.optimizer.parameter_offload.fwd_pre_hook.remove()
        elif self.stage:
            self.engine.optimizer.scaled_global_norm = self._norm
        else:
            self.engine.clip_fp32_gradients = self._clip_whole_gradients

    def _restore_bits(self, initial: dict[str, Tensor]) -> None:
        """DeepSpeed rounds the weights to bf16 before it copies them to its fp32 masters."""

        def fetch(name: str, key: str, start: int, length: int) -> Tensor:
            return initial[name][start : start + length] if key == "weight" else torch.zeros(length)

        self.load(fetch, num_steps=0)

    # ------------------------------------------------------------------ a step

    @contextlib.contextmanager
    def _window(self) -> Iterator[None]:
        if not self.stage:
            yield
            self.engine.allreduce_gradients()
            self._sum_copies()
            return
        if self.stage == 3:  # else a parameter without gradient in this step is given that of an older one
            self.zero.grad_partitions_flat_buffer.zero_()
            for flat in self.zero.fp32_partitioned_groups_flat if self.offloads else ():
                if flat.grad is not None:
                    flat.grad.zero_()
        with self.engine.coalesce_grad_reduction():
            if self.stage == 3 and self.recipe.parallel.gather == "step":
                self._gather_all()
            yield
        if self.stage == 3:
            self.zero.parameter_offload.get_param_coordinator().release_and_reset_all(self.engine.module)
        self._sum_copies()

    def _after_backward(self) -> None:
        """Reduce what this micro-batch left, and add it to the shards, which were zeroed when the step began."""
        if not self.reduces_often:
            return
        self.zero._coalesce_grad_reduction, self.zero.micro_step_id = False, 1  # 0 would overwrite the shards
        for param in self.named.values():
            if param.grad is not None:
                self.zero.reduce_ready_partitions_and_remove_grads(param)
        self.zero.independent_gradient_partition_epilogue()
        self.zero._coalesce_grad_reduction = True

    def _gather_all(self) -> None:
        """One collective per replica group; the hooks of the layers then find their weights, and leave them."""
        for kind in self.mesh.replicas:
            params = [param for name, param in self.named.items() if self.placements[name].kind == kind]
            if params:
                params[0].all_gather_coalesced(params).wait()
        for param in self.named.values():
            param.ds_active_sub_modules.add("step")  # a weight is released only when this set is empty

    def _sum_copies(self) -> None:
        """What ZeRO does not know of: other pods, and the other end of a tied pipeline."""
        if self.mesh.layout.replicate > 1:
            for _, shards in self._gradients():
                for shard in shards:
                    dist.all_reduce(shard, group=self.mesh.across_pods)
        if self.ends:
            self._sum_ends({name: shards for name, shards in self._gradients() if name in self.ends})

    def _norm(self) -> Tensor:
        """Shards are disjoint over a pod, so the norm is one sum over the world; replicas count by their share."""
        squares = [
            shard.float().square().sum().to(self.mesh.device) / (1 if self.stage else self._replicas(name))
            for name, shards in self._gradients()
            for shard in shards
            if name not in self.copies
        ]
        return self._checked((sum_over(torch.stack(squares).sum(), None) / self.mesh.layout.replicate).sqrt())

    def _gradients(self) -> Iterator[tuple[str, list[Tensor]]]:
        """(first parameter, this rank's shards of the gradients) of each of DeepSpeed's groups of parameters."""
        if not self.stage:
            yield from ((name, [param.grad]) for name, param in self.named.items())
            return
        if self.recipe.parallel.nvme:  # on the disk by now: DeepSpeed kept their norms
            yield next(iter(self.named)), list(self.zero.norm_for_param_grads.values())
            return
        names = {id(param): name for name, param in self.named.items()}
        groups = self.zero.fp16_groups if self.stage == 3 else self.zero.round_robin_bit16_groups
        for index, params in enumerate(groups):
            yield names[id(params[0])], self._shards_of(index)

    def _shards_of(self, index: int) -> list[Tensor]:
        if not self.offloads:
            return self.zero.averaged_gradients[index]
        flats = self.zero.fp32_partitioned_groups_flat if self.stage == 3 else self.zero.single_partition_of_fp32_groups
        return [flats[index].grad]

    def _clip_whole_gradients(self) -> None:
        norm = self._norm()
        self.engine._global_grad_norm = norm
        if self.recipe.optim.clip:
            for param in self.named.values():
                param.grad.mul_((self.recipe.optim.clip / (norm + 1e-6)).clamp(max=1.0))

    def _replicas(self, name: str) -> int:
        return dist.get_world_size(self.mesh.replicas[self.placements[name].kind])

    # ------------------------------------------------------------------ shards

    def shards(self) -> list[Shard]:
        if self.mesh.pod:
            return []  # the first has the same
        if self.stage == 3:
            return [self._zero3_shard(piece) for piece in self._zero3_pieces() if piece.name not in self.copies]
        return [
            Shard(
                piece.name,
                piece.start,
                {key: values[piece.offset : piece.offset + piece.length] for key, values in state.items()},
            )
            for state, pieces in self._buffers()
            for piece in pieces
            if piece.name not in self.copies
        ]

    def load(self, fetch: FetchState, num_steps: int) -> None:
        if self.stage == 3:
            return self._load_zero3(fetch, num_steps)
        for name, param in self.named.items():
            param.data.copy_(fetch(name, "weight", 0, param.numel()).view_as(param))
        self._make_moments(num_steps)
        for state, pieces in self._buffers(is_loading=True):
            for piece in pieces:
                for key, values in state.items():
                    fetched = fetch(piece.name, key, piece.start, piece.length)
                    values[piece.offset : piece.offset + piece.length] = fetched

    def _buffers(self, is_loading: bool = False) -> Iterator[tuple[dict[str, Tensor], list[Piece]]]:
        """Stages 0 to 2: flat state buffers, and what this rank saves of them, or needs in them."""
        if self.stage == 0:
            for name, param in self.named.items():
                state = self.optimizer.state[param]
                flat = {"weight": param.detach().view(-1), **{key: state[key].view(-1) for key in MOMENTS}}
                rank, replicas = dist.get_rank(self.mesh.replicas[self.placements[name].kind]), self._replicas(name)
                if is_loading:  # every replica holds all of it, and saves its part
                    rank, replicas = 0, 1
                part = math.ceil(param.numel() / replicas)
                start = min(rank * part, param.numel())
                yield flat, [Piece(name, start, min(part, param.numel() - start), start)]
            return
        names = {id(param): name for name, param in self.named.items()}
        for index, flat in enumerate(self.zero.single_partition_of_fp32_groups):
            state = self.optimizer.state[flat]
            first = dist.get_rank(self.zero.real_dp_process_group[index]) * flat.numel()
            pieces = []
            params, offsets = self.zero.round_robin_bit16_groups[index], self.zero.round_robin_bit16_offsets[index]
            for param, offset in zip(params, offsets, strict=True):
                begin, end = max(offset, first), min(offset + param.numel(), first + flat.numel())
                if begin < end:
                    pieces.append(Piece(names[id(param)], begin - offset, end - begin, begin - first))
            yield {"weight": flat.detach(), **{key: state[key] for key in MOMENTS}}, pieces

    def _zero3_pieces(self) -> Iterator[Piece]:
        for name, param in self.named.items():
            start = param.ds_zero_partition_rank * param.partition_numel()
            length = min(param.partition_numel(), param.ds_numel - start)  # the last partition is padded
            if length > 0:
                yield Piece(name, start, length, 0)

    def _zero3_shard(self, piece: Piece) -> Shard:
        param = self.named[piece.name]
        tensors = {}
        for key in STATE_KEYS:
            values = safe_get_local_fp32_param(param) if key == "weight" else safe_get_local_optimizer_state(param, key)
            # What comes from a disk lies in a buffer that the next read fills again.
            tensors[key] = (values.clone() if self.recipe.parallel.nvme else values).view(-1)[: piece.length]
        return Shard(piece.name, piece.start, tensors)

    def _load_zero3(self, fetch: FetchState, num_steps: int) -> None:
        self._make_moments(num_steps)
        for piece in self._zero3_pieces():
            param = self.named[piece.name]
            for key in STATE_KEYS:
                values = torch.zeros(param.partition_numel(), device=self.mesh.device)
                values[: piece.length] = fetch(piece.name, key, piece.start, piece.length)
                if key == "weight":
                    safe_set_local_fp32_param(param, values)
                    param.ds_tensor.data.copy_(values)  # the setter writes the master copy only
                else:
                    safe_set_local_optimizer_state(param, values, key)

    def _make_moments(self, num_steps: int) -> None:
        if self.stage == 3:
            owners: list[Tensor] = self.zero.fp32_partitioned_groups_flat
        else:
            owners = self.zero.single_partition_of_fp32_groups if self.stage else list(self.named.values())
        for owner in owners:
            state = {key: torch.zeros_like(owner) for key in MOMENTS}
            self.optimizer.state[owner] = {"step": torch.tensor(float(num_steps), device=owner.device), **state}


def _check_nvme(folder: str | None) -> None:
    if folder is None:
        return
    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise PlanError(
            f"parallel.nvme: {folder}; DeepSpeed's async_io needs a C++ compiler and libaio with its headers; install "
            f"libaio-dev, or set parallel.nvme to null"
        )


def _moe_marker() -> nn.Module:
    """ZeRO 0 to 2 honour expert tags only if a DeepSpeed MoE stands somewhere inside; ZeRO 3 refuses one."""
    marker = DeepSpeedMoE.__new__(DeepSpeedMoE)
    nn.Module.__init__(marker)
    marker.num_experts, marker.set_deepspeed_parallelism = 1, lambda *_: None
    return marker
