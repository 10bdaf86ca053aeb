"""A step through pipeline stages: torch's schedules over stages whose weights an engine shards.

Router statistics leave a stage as values. What they add to the loss is attached where they were made: no traffic between
stages, no state on modules. Letters: L layers, E experts.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from moe_zoo.comm.mesh import Mesh
from moe_zoo.engines.batch import MicroBatch, StepScale
from moe_zoo.engines.objective import LossParts, Objective, noted_stats
from moe_zoo.layers.router import RouterStats
from moe_zoo.models.decoder import DecoderOutput
from moe_zoo.parallel.build import RankStages
from moe_zoo.parallel.context import RowSplit
from moe_zoo.spec.recipe import Recipe, row_parts

StageCall = Callable[..., DecoderOutput]  # (stage index, hidden or ids, positions, mask, row seeds)


class _AttachLoss(torch.autograd.Function):
    """``x`` unchanged; backward also gives ``added`` a gradient of one, as if it had been added to the loss."""

    @staticmethod
    def forward(ctx, x, added):
        ctx.like = added
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones_like(ctx.like)


class StageAdapter(nn.Module):
    """What a schedule sees of a stage: tensors in, tensors out; statistics go to the pipeline's ledger.

    How many cross from stage to stage is the model's affair (``wire_shapes``): one in a decoder, two where a decoder
    hands on what its encoder said. ``held`` is registered as a child for FSDP2, which torch's pipelining drives itself; DeepSpeed is called instead.
    """

    def __init__(self, index: int, pipeline: "Pipeline", call: StageCall | None, stage: nn.Module):
        super().__init__()
        self.index, self.call = index, call
        self.unregistered = [pipeline, stage]
        if call is None:
            self.held = stage

    def forward(self, *x: Tensor, positions: Tensor, row_seeds: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        """Hidden states or ids of one micro-batch -> hidden states or logits; ``positions`` are those of whole rows."""
        pipeline, stage = self.unregistered
        inputs = (x[0] if len(x) == 1 else x, *pipeline.split.own_view(positions), row_seeds)
        output = self.call(self.index, *inputs) if self.call else stage(*inputs)
        return pipeline.noted(self.index, output)

    def parameters(self, recurse: bool = True):
        """Those of the stage: split backwards ask for them."""
        return self.unregistered[1].parameters(recurse)


class _Stage(PipelineStage):
    """A stage whose engine may act when a micro-batch has all its gradients."""

    def __init__(self, after_backward: Callable[[PipelineStage], None] | None, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.after_backward = after_backward

    def backward_maybe_with_nosync(self, backward_type, *args, **kwargs):
        result = super().backward_maybe_with_nosync(backward_type, *args, **kwargs)
        if self.after_backward and backward_type != "input":  # the weights' part of a split one comes later
            self.after_backward(self)
        return result


class Pipeline:
    """The stages of this rank under one schedule."""

    def __init__(
        self,
        module: RankStages,
        objective: Objective,
        mesh: Mesh,
        recipe: Recipe,
        split: RowSplit,
        *,
        factor: float,
        wrap: Callable[[StageAdapter], nn.Module],
        call: StageCall | None,
        splits_backward: bool,
        after_backward: Callable[[PipelineStage], None] | None,
    ):
        """``factor`` is the engine's; ``wrap`` shards an adapter, ``call`` runs a stage by the engine (else directly)."""
        self.objective, self.mesh, self.recipe, self.split, self.factor = objective, mesh, recipe, split, factor
        layout = mesh.layout
        self.num_stages = layout.num_stages
        self.owner = {stage: rank for rank in range(layout.pp) for stage in layout.stages_of(rank)}
        stages = {int(index): stage for index, stage in module.stages.items()}
        self.adapters = {index: wrap(StageAdapter(index, self, call, stage)) for index, stage in stages.items()}
        self.is_last = self.num_stages - 1 in stages
        self.schedule = self._schedule(splits_backward, after_backward)
        self.scale: StepScale | None = None  # set while a step runs
        self.step_counts: dict[int, Tensor] = {}  # by stage, where a counting pass was needed
        self.ledger: list[tuple[int, RouterStats, LossParts]] = []
        self.seen: dict[int, Tensor] = {}  # counts of the pass that only counts

    # ------------------------------------------------------------------ a training step

    def backward(self, batch: list[MicroBatch], scale: StepScale) -> tuple[list[LossParts], list[RouterStats]]:
        """Run the schedule. Parts and statistics hold what this rank's stages saw, layers in order."""
        self.step_counts = self._count(batch) if self.objective.needs_counting_pass(len(batch)) else {}
        self.scale, self.ledger = scale, []
        own = [self.split.own(micro.rows) for micro in batch]
        input_ids = [torch.cat(ids) for ids in zip(*(_tensors(rows.ids) for rows in own), strict=True)]
        targets = torch.cat([rows.targets for rows in own])
        positions = torch.cat([micro.rows.positions for micro in batch])
        seeds = torch.cat([micro.row_seeds for micro in batch])
        losses: list[Tensor] = []
        self.schedule.step(
            *(input_ids if 0 in self.adapters else []),
            **({"target": targets, "losses": losses} if self.is_last else {}),
            positions=positions,
            row_seeds=seeds,
            return_outputs=False,
        )
        self.scale = None
        return self._parts(losses), self._stats()

    def noted(self, index: int, output: DecoderOutput) -> Tensor | tuple[Tensor, ...]:
        """Keep the statistics of a stage's micro-batch and attach what they add to the loss."""
        first, *others = _tensors(output.logits)
        if self.scale is None:  # a pass without a step: evaluation, or counting
            if output.stats is not None:
                counts = output.stats.counts.sum(1, keepdim=True)
                self.seen[index] = self.seen[index] + counts if index in self.seen else counts
            return output.logits
        # A split backward detaches a stage's outputs in place, which a view forbids: all of them are cloned.
        first = first.clone() if output.stats is None else self._with_losses(index, first, output)
        return (first, *(other.clone() for other in others)) if others else first

    def _with_losses(self, index: int, first: Tensor, output: DecoderOutput) -> Tensor:
        added, balance, z = self.objective.routing(output, self.scale, self.step_counts.get(index))
        self.ledger.append((index, noted_stats(output), LossParts(added.detach(), torch.zeros_like(z), balance, z)))
        return _AttachLoss.apply(first, added * self.factor)

    def _parts(self, losses: list[Tensor]) -> list[LossParts]:
        zero = torch.zeros((), device=self.mesh.device)
        tokens = [LossParts(loss.detach(), loss.detach() / self.factor, zero, zero) for loss in losses]
        return [*tokens, *(parts for _, _, parts in self.ledger)] or [LossParts(zero, zero, zero, zero)]

    def _stats(self) -> list[RouterStats]:
        """One entry: sums over micro-batches, the layers of all own stages behind each other."""
        by_stage: dict[int, list[RouterStats]] = {}
        for index, stats, _ in self.ledger:
            by_stage.setdefault(index, []).append(stats)
        summed = [[torch.stack(v).sum(0) for v in zip(*by_stage[i], strict=True)] for i in sorted(by_stage)]
        return [RouterStats(*map(torch.cat, zip(*summed, strict=True)))] if summed else []

    def _token_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.objective.token_loss_sum(logits, targets) * self.factor / self.scale.num_targets

    def _schedule(self, splits_backward: bool, after_backward: Callable[[PipelineStage], None] | None):
        recipe, mesh = self.recipe, self.mesh
        rows = recipe.train.global_batch // recipe.train.micro_batches // mesh.dp
        columns = [length // mesh.cp for length in row_parts(recipe.data)]
        ids = tuple(torch.empty(rows, n, dtype=torch.int64, device=mesh.device) for n in columns)
        # Static shapes: nothing need run to infer them.
        wire = self._wire(rows, columns)
        logits = self._empty((rows, columns[-1], recipe.model.vocab_size // mesh.tp))
        # A separate weight pass writes .grad of weights that ZeRO-3 has freed: a no-op makes the input pass do both.
        whole = {} if splits_backward else {"dw_builder": lambda: lambda: None}
        built = [
            _Stage(
                after_backward,
                adapter,
                index,
                self.num_stages,
                mesh.device,
                input_args=wire if index else ids,
                output_args=wire if index + 1 < self.num_stages else logits,
                group=mesh.pp_group,
                **whole,
            )
            for index, adapter in self.adapters.items()
        ]
        kind = schedules.get_schedule_class(mesh.layout.schedule)
        stages = built if issubclass(kind, schedules.PipelineScheduleMulti) else built[0]
        return kind(stages, recipe.train.micro_batches, loss_fn=self._token_loss, scale_grads=False)

    # ------------------------------------------------------------------ forward alone

    @torch.no_grad()
    def forward(self, micro: MicroBatch) -> Tensor | None:
        """Rows through all stages, one after the other; logits on the ranks that hold the last one, else None."""
        rows, x = micro.rows, _tensors(self.split.own(micro.rows).ids)
        wire, group = self._wire(len(x[0]), [ids.shape[1] for ids in x]), self.mesh.pp_group
        for index in range(self.num_stages):
            if self.owner[index] != self.mesh.pp_rank:
                continue
            if index and self.owner[index - 1] != self.mesh.pp_rank:
                x = tuple(torch.empty_like(tensor) for tensor in wire)
                for tensor in x:
                    dist.recv(tensor, group=group, group_src=self.owner[index - 1])
            x = _tensors(self.adapters[index](*x, positions=rows.positions, row_seeds=micro.row_seeds))
            if index + 1 < self.num_stages and self.owner[index + 1] != self.mesh.pp_rank:
                for tensor in x:
                    dist.send(tensor.contiguous(), group=group, group_dst=self.owner[index + 1])
        return x[0] if self.is_last else None

    def from_last_stage(self, value: Tensor) -> Tensor:
        """What the ranks of the last stage have, on every rank."""
        dist.broadcast(value, group=self.mesh.pp_group, group_src=self.owner[self.num_stages - 1])
        return value

    def _wire(self, rows: int, columns: list[int]) -> tuple[Tensor, ...]:
        """Examples of what crosses from stage to stage, for rows of which ``columns`` are on this rank and its peers.

        An encoder-decoder has columns of two kinds.
        """
        some_stage = next(iter(self.adapters.values())).unregistered[1]
        return tuple(map(self._empty, some_stage.wire_shapes(rows, *(n // self.mesh.tp for n in columns))))

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[self.recipe.precision.compute]
        # Without requires_grad no gradient would be sent back.
        return torch.empty(shape, dtype=dtype, device=self.mesh.device, requires_grad=True)

    def _count(self, batch: list[MicroBatch]) -> dict[int, Tensor]:
        """Counts of the whole step per stage, before its first backward."""
        self.seen = {}
        for micro in batch:
            self.forward(micro)
        return {index: self.objective.pooled_counts(self.seen[index]) for index in sorted(self.seen)}


def _tensors(x: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else x
