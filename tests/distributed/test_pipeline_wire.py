"""A pipeline carries as many tensors from stage to stage as the model says: an encoder-decoder hands on two."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_zoo.certify.problem import BOS, step_rows
from moe_zoo.comm.mesh import Mesh
from moe_zoo.engines.batch import MicroBatch, StepScale
from moe_zoo.engines.objective import Objective
from moe_zoo.engines.pipeline import Pipeline
from moe_zoo.models.decoder import DecoderOutput
from moe_zoo.ops.documents import unpack_rows
from moe_zoo.parallel.build import RankStages
from moe_zoo.parallel.context import RowSplit
from moe_zoo.spec.layout import resolve_layout
from moe_zoo.testing import run_distributed
from tests.law import make_recipe

WIDTH, VOCAB, MEMORY = 16, 29, 3


class TwoTensorStage(nn.Module):
    """The first half makes a memory of another shape, which every later stage reads and hands on."""

    def __init__(self, index: int, num_stages: int):
        super().__init__()
        torch.manual_seed(index)
        self.is_first, self.is_last = index == 0, index + 1 == num_stages
        self.embed = nn.Embedding(VOCAB, WIDTH) if self.is_first else None
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB) if self.is_last else None

    def forward(self, x, positions, mask, row_seeds) -> DecoderOutput:
        if self.is_first:
            hidden = self.embed(x)
            memory = hidden[:, :MEMORY].tanh()
        else:
            hidden, memory = x
        hidden = hidden + self.mix(hidden).relu() + (hidden @ memory.mT).softmax(-1) @ memory
        return DecoderOutput(self.head(hidden) if self.is_last else (hidden, memory * 1.5), None)

    def wire_shapes(self, rows: int, seq_len: int) -> tuple[tuple[int, ...], ...]:
        return (rows, seq_len, WIDTH), (rows, MEMORY, WIDTH)


def wire_recipe(schedule: str):
    return make_recipe(
        parallel__pp=2, parallel__schedule=schedule, model__moe=None, model__num_layers=4, train__micro_batches=4
    )


def gradients(schedule: str) -> tuple[dict[str, Tensor], Tensor | None]:
    """On a rank: the gradients of its stages, and its logits of a forward alone."""
    recipe = wire_recipe(schedule)
    mesh = Mesh(resolve_layout(recipe, 2, 2), torch.device("cpu"))
    layout = mesh.layout
    module = RankStages({i: TwoTensorStage(i, layout.num_stages) for i in layout.stages_of(mesh.pp_rank)})
    pipeline = Pipeline(
        module, Objective(recipe, mesh), mesh, recipe, RowSplit(mesh, "gather"), factor=1.0,
        wrap=lambda adapter: adapter, call=None, splits_backward=True, after_backward=None,
    )  # fmt: skip
    tokens = step_rows(recipe, 0)[0].unflatten(0, (4, -1))
    batch = [MicroBatch(unpack_rows(rows, BOS), torch.zeros(len(rows))) for rows in tokens]
    pipeline.backward(batch, StepScale(1, tokens[..., 1:].numel(), tokens.shape[2] - 1, 8, 4))
    logits = pipeline.forward(batch[0]._replace(row_seeds=None))
    return {name: param.grad for name, param in module.named_parameters()}, logits


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "DualPipeV"])
def test_two_tensors_cross_and_their_gradients_come_back(schedule):
    recipe = wire_recipe(schedule)
    stages = [
        TwoTensorStage(i, resolve_layout(recipe, 2, 2).num_stages)
        for i in range(resolve_layout(recipe, 2, 2).num_stages)
    ]
    rows, first = unpack_rows(step_rows(recipe, 0)[0], BOS), None
    x = rows.input_ids
    for stage in stages:
        x = stage(x, None, None, None).logits
    F.cross_entropy(x.flatten(0, 1), rows.targets.flatten(), ignore_index=-100, reduction="sum").backward()
    found = run_distributed(gradients, schedule)
    seen = {}
    for grads, logits in found:
        seen |= grads
        first = logits if logits is not None else first
    torch.testing.assert_close(first, x[: len(first)].detach(), rtol=0, atol=1e-5)
    for index, stage in enumerate(stages):
        for name, param in stage.named_parameters():
            torch.testing.assert_close(seen[f"stages.{index}.{name}"], param.grad, rtol=1e-5, atol=1e-5)
