"""What every engine does in a step, and the few things in which they differ.

The law: the loss of the world is the sum of what its ranks compute; a parameter's gradient is the sum over its
replica group, the ranks that hold the same slice. ``factor`` is what an engine's own averaging makes necessary.

Letters: L layers, E experts.
"""

import abc
import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from moe_zoo.comm.collectives import exchange, gather, sum_over
from moe_zoo.comm.mesh import Mesh
from moe_zoo.engines.batch import MicroBatch, StepScale
from moe_zoo.engines.objective import LossParts, Objective, noted_stats
from moe_zoo.engines.pipeline import Pipeline, StageAdapter, StageCall
from moe_zoo.layers.moe import MoELayer
from moe_zoo.layers.router import RouterStats
from moe_zoo.models.decoder import DecoderOutput
from moe_zoo.ops.balance import bias_step
from moe_zoo.ops.documents import IGNORED, PackedRows, padded
from moe_zoo.parallel.build import PlacedModel
from moe_zoo.parallel.context import RowSplit
from moe_zoo.parallel.position import follow
from moe_zoo.parallel.recompute import recompute_blocks
from moe_zoo.spec.errors import MoeZooError
from moe_zoo.spec.recipe import Recipe

STATE_KEYS = ("weight", "exp_avg", "exp_avg_sq")
FetchState = Callable[[str, str, int, int], Tensor]  # (parameter, key, start in the slice, length) -> flat fp32 values


class Shard(NamedTuple):
    """A run of this rank's flattened slice of a parameter: fp32 ``weight``, ``exp_avg`` and ``exp_avg_sq``, all flat."""

    name: str  # of the local tensor, whose placement says what it is a slice of
    start: int
    tensors: dict[str, Tensor]


class StepStats(NamedTuple):
    """What one optimizer step did, equal on every rank. Routing statistics are None in a dense model."""

    loss: float  # nats per target
    balance: float  # 1.0 is even
    z: float
    grad_norm: float
    num_targets: int
    num_tokens: int
    counts_LE: Tensor | None  # slots that chose each expert
    entropy_L: Tensor | None  # mean entropy of the router in nats
    dropped_L: Tensor | None  # share of slots refused


class Engine(abc.ABC):
    """Owns a placed model and its AdamW."""

    factor: float = 1.0  # every loss is multiplied by it before backward

    def __init__(self, placed: PlacedModel, mesh: Mesh, recipe: Recipe):
        self.module, self.placements = placed
        self.mesh, self.recipe = mesh, recipe
        self.position = follow(self.module)
        recompute_blocks(self.module, recipe.parallel.recompute)
        self.split = RowSplit(mesh, recipe.parallel.context)
        self.objective = Objective(recipe, mesh)
        self.named = self.module.global_names(self.module.named_parameters())
        # Of a tied vocabulary in a pipeline: its local names. The head is a copy, and counts neither in norm nor shards.
        is_twice = recipe.model.tie_embeddings and mesh.pp > 1
        self.ends = [name for name in ("embed.weight", "head.weight") if is_twice and name in self.named]
        self.copies = {name for name, placement in self.placements.items() if placement.name != name}
        self.routers = [layer.router for layer in self.module.modules() if isinstance(layer, MoELayer)]
        self.own_layers = [recipe.model.sparse_layers.index(router.layer) for router in self.routers]
        self.pipeline: Pipeline | None = None

    def step(self, batch: list[MicroBatch], lr: float) -> StepStats:
        """One optimizer step over the global batch, of which ``batch`` is the part of this rank's rows."""
        scale, parts, stats = self.backward(batch)
        self.position.move("the optimizer's step")
        return self._summary(scale, parts, stats, self.update(lr))

    def backward(self, batch: list[MicroBatch]) -> tuple[StepScale, list[LossParts], list[RouterStats]]:
        """Gradients of the whole step, summed over micro-batches and replicas, and what was seen on the way."""
        self.module.train()
        scale = self._scale(batch)
        if self.pipeline:
            with self._window():
                return scale, *self.pipeline.backward(batch, scale)
        batch = [self._own(micro) for micro in batch]
        step_counts = self._count(batch) if self.objective.needs_counting_pass(len(batch)) else None
        parts, stats = [], []
        with self._window():
            for index, micro in enumerate(batch):
                self._begin(is_last=index + 1 == len(batch))
                output = self.forward(micro)
                self.position.move("the loss")
                part = self.objective(output, micro.rows.targets, scale, step_counts)
                (part.total * self.factor).backward()
                self._after_backward()
                parts.append(part._replace(total=part.total.detach()))
                if output.stats is not None:
                    stats.append(noted_stats(output))
        return scale, parts, stats

    @torch.no_grad()
    def evaluate(self, rows: PackedRows) -> tuple[float, int]:
        """(sum of nats, targets) of these rows over the world. Every rank calls it equally often."""
        self.module.eval()
        logits, sums = self.logits(rows), torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        if logits is not None:  # every rank of a row group counts all of its targets
            sums[0] = self.objective.token_loss_sum(logits, self.split.own(rows).targets)
            sums[1] = (rows.targets != IGNORED).sum()
        nats, targets = sum_over(sums, None).tolist()
        return nats, round(targets) // (self.mesh.cp * self.mesh.tp)

    @torch.no_grad()
    def next_token_logits(self, rows: PackedRows) -> Tensor:
        """fp32 logits after the last position of one row, (vocab,), on every rank. Collective."""
        self.module.eval()
        num_tokens = rows.input_ids.shape[1]
        with self._padded_to(num_tokens):
            logits = self.logits(padded(rows, self.split.granule))
        last = torch.zeros(self.recipe.model.vocab_size, device=self.mesh.device)
        if logits is not None:
            whole = gather(gather(logits, 2, self.mesh.tp_group), 1, self.mesh.cp_group)
            in_order = self.split.order(whole.shape[1], whole.device).argsort()
            last.copy_(whole[0, in_order[num_tokens - 1]])
        return last if self.pipeline is None else self.pipeline.from_last_stage(last)

    @contextlib.contextmanager
    def _padded_to(self, num_tokens: int) -> Iterator[None]:
        """Rows, or a decoder's part of them, have so many tokens; what is behind them takes no expert's capacity."""
        first = self.recipe.model.num_encoder_layers
        splits = [r.rows for r in self.routers if isinstance(r.rows, RowSplit) and r.layer >= first]
        for split in splits:
            split.num_tokens = num_tokens
        yield
        for split in splits:
            split.num_tokens = None

    def logits(self, rows: PackedRows) -> Tensor | None:
        """This rank's part of the logits of whole rows; None on the ranks that do not hold the last stage."""
        micro = MicroBatch(rows)
        return self.pipeline.forward(micro) if self.pipeline else self.forward(self._own(micro)).logits

    @abc.abstractmethod
    def forward(self, micro: MicroBatch) -> DecoderOutput:
        """The whole model, where there is no pipeline, on this rank's part of the rows."""

    @abc.abstractmethod
    def update(self, lr: float) -> float:
        """Clip, step the optimizer, return the gradient norm of the whole model before clipping."""

    @abc.abstractmethod
    def gradient(self, name: str) -> Tensor:
        """Gradient of the local slice between ``backward`` and ``update``, whole over its replicas (collective)."""

    @abc.abstractmethod
    def weight(self, name: str) -> Tensor:
        """fp32 weight of the local slice, whole over its replicas (collective)."""

    @abc.abstractmethod
    def shards(self) -> list[Shard]:
        """What this rank saves. Over the world, every element of every parameter stands in exactly one shard."""

    @abc.abstractmethod
    def load(self, fetch: FetchState, num_steps: int) -> None:
        """Set weights and moments from ``fetch``, as after ``num_steps`` optimizer steps."""

    @contextlib.contextmanager
    def _window(self) -> Iterator[None]:
        """Around all micro-batches of a step; gradients are reduced when it closes."""
        yield

    def _build_pipeline(
        self,
        *,
        wrap: Callable[[StageAdapter], nn.Module],
        call: StageCall | None,
        splits_backward: bool,
        after_backward: Callable[[PipelineStage], None] | None,
    ) -> None:
        """Once the stages are sharded, where there is more than one."""
        if self.mesh.pp > 1:
            self.pipeline = Pipeline(
                self.module,
                self.objective,
                self.mesh,
                self.recipe,
                self.split,
                factor=self.factor,
                wrap=wrap,
                call=call,
                splits_backward=splits_backward,
                after_backward=after_backward,
            )

    def _begin(self, is_last: bool) -> None:
        """Before each micro-batch."""

    def _after_backward(self) -> None:
        """After each micro-batch, outside a pipeline."""

    def _sum_ends(self, shards: dict[str, list[Tensor]]) -> None:
        """The gradient of a vocabulary tied across a pipeline is what its two copies got together, on both.

        ``shards``: this rank's shards of the gradients of the ends that it has. The order of a sum of two does not
        matter, so the copies stay equal to the last bit.
        """
        if len(shards) == 2:
            for first, last in zip(*shards.values(), strict=True):
                last.copy_(first.add_(last))
        elif shards:
            (name,) = shards
            peer = self.mesh.pp - 1 if name == "embed.weight" else 0
            for shard in shards[name]:
                shard.add_(exchange(shard, peer, self.mesh.pp_group))

    def buffers(self) -> dict[str, Tensor]:
        """Router biases of this rank's stages, by their names in the whole model."""
        return self.module.global_names(self.module.named_buffers())

    def _own(self, micro: MicroBatch) -> MicroBatch:
        """This rank's columns of the rows."""
        return micro._replace(rows=self.split.own(micro.rows))

    @staticmethod
    def _call(module: nn.Module, micro: MicroBatch) -> DecoderOutput:
        rows = micro.rows
        return module(0, rows.ids, rows.positions, rows.mask, micro.row_seeds)

    def _scale(self, batch: list[MicroBatch]) -> StepScale:
        local = sum((micro.rows.targets != IGNORED).sum() for micro in batch)
        seq_len = batch[0].rows.seq_len
        global_rows = len(batch[0].rows.targets) * len(batch) * self.mesh.dp
        num_targets = int(sum_over(local, self.mesh.stage_group)) // (self.mesh.cp * self.mesh.tp)
        if not num_targets:
            raise MoeZooError("data: a global batch without a single target; every document is empty; check the data")
        return StepScale(num_targets, global_rows * seq_len, seq_len, global_rows, len(batch))

    @torch.no_grad()
    def _count(self, batch: list[MicroBatch]) -> Tensor | None:
        """A forward of every micro-batch for its counts alone: the price of an exact global balance."""
        stats = [self.forward(micro).stats for micro in batch]
        if stats[0] is None:
            return None
        return self.objective.pooled_counts(sum(s.counts.sum(1, keepdim=True) for s in stats))

    def _checked(self, norm: Tensor) -> Tensor:
        if not torch.isfinite(norm):
            raise MoeZooError(
                f"train: the gradient norm is {norm.item()}; the step was not taken; lower optim.lr, raise "
                f"optim.warmup_steps or set balance.z_coefficient, and resume from the last checkpoint"
            )
        return norm

    def _summary(self, scale: StepScale, parts: list[LossParts], stats: list[RouterStats], norm: float) -> StepStats:
        losses = torch.stack([torch.stack((part.token, part.balance, part.z)) for part in parts]).sum(0).double()
        layers, experts = len(self.recipe.model.sparse_layers), self.recipe.model.num_scored
        table = losses.new_zeros(layers, experts + 2)  # counts, entropy, dropped of the layers that live here
        if stats:
            counts, _, _, entropy, dropped = (torch.stack(v).sum(0).double() for v in zip(*stats, strict=True))
            table[self.own_layers] = torch.cat((counts, entropy[:, None], dropped[:, None]), dim=1)
        losses, table = sum_over(torch.cat((losses, table.flatten())), None).split([3, table.numel()])
        table = table.view(layers, experts + 2)
        counts, entropy, dropped = table.split([experts, 1, 1], dim=1)
        self._move_bias(counts)
        has_experts = layers > 0
        return StepStats(
            *losses.tolist(),
            norm,
            scale.num_targets,
            scale.total_tokens,
            counts_LE=counts if has_experts else None,
            entropy_L=entropy[:, 0] / scale.total_tokens if has_experts else None,
            dropped_L=dropped[:, 0] / (scale.total_tokens * self.objective.top_k) if has_experts else None,
        )

    def _move_bias(self, counts_LE: Tensor) -> None:
        if self.recipe.balance.method != "bias":
            return
        moves = bias_step(counts_LE, self.recipe.balance.bias_update_rate)
        for layer, router in zip(self.own_layers, self.routers, strict=True):
            router.selection_bias[: router.num_experts] += moves[layer, : router.num_experts]
