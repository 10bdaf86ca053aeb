"""The loss of a step, as a sum over micro-batches and ranks in which each token counts once.

Letters: L layers, B rows, E experts.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_zoo.comm.collectives import sum_over
from moe_zoo.comm.mesh import Mesh
from moe_zoo.engines.batch import StepScale
from moe_zoo.layers.router import RouterStats
from moe_zoo.models.decoder import DecoderOutput
from moe_zoo.ops.balance import balance_loss, pool_tokens, z_loss
from moe_zoo.ops.documents import IGNORED
from moe_zoo.parallel.tensor import vocabulary_loss_sum
from moe_zoo.spec.recipe import Recipe


class LossParts(NamedTuple):
    """One micro-batch's share of the step's loss on this rank; ``total`` alone carries a gradient."""

    total: Tensor
    token: Tensor
    balance: Tensor
    z: Tensor


def token_loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy in fp32 over the targets that count."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, 1).to(wide), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def as_whole_rows(sums: Tensor, shares: Tensor | None) -> Tensor:
    """Sums (L, ...) over the tokens that a layer saw, as if it had seen as many as whole rows have.

    The blocks of an encoder and of its decoder see different tokens; each layer's mean counts alike.
    """
    return sums if shares is None else sums / shares.to(sums.dtype).view(-1, *[1] * (sums.ndim - 1))


def noted_stats(output: DecoderOutput) -> RouterStats:
    """What is reported of a micro-batch, (L, ...): sums over its rows, counts as they were."""
    stats = RouterStats(*(value.detach().sum(1) for value in output.stats))
    whole = {name: as_whole_rows(getattr(stats, name), output.shares) for name in ("entropy_sums", "dropped")}
    return stats._replace(**whole)


class Objective:
    """Token loss plus routing losses of a recipe."""

    def __init__(self, recipe: Recipe, mesh: Mesh):
        self.spec, self.mesh = recipe.balance, mesh
        router = recipe.model.moe.router if recipe.model.moe else None
        self.top_k = router.top_k if router else 1
        self.slots_per_token = router.slots_per_token(recipe.data.seq_len) if router else 1.0
        self.num_layers = len(recipe.model.sparse_layers)
        self.aux_coefficient = self.spec.aux_coefficient if self.spec.method == "aux_loss" else 0.0

    def needs_counting_pass(self, micro_batches: int) -> bool:
        """Whether counts of the whole step must be known before its first backward."""
        return self.spec.scope == "global_batch" and micro_batches > 1 and self.aux_coefficient > 0

    def pooled_counts(self, counts_LBE: Tensor) -> Tensor:
        """Counts of each local row's pool, (L, B or 1, E)."""
        if self.spec.scope == "sequence":
            is_split = self.mesh.cp * self.mesh.tp > 1
            return sum_over(counts_LBE, self.mesh.seq_group) if is_split else counts_LBE
        return sum_over(counts_LBE.sum(1, keepdim=True), self.mesh.stage_group)

    def __call__(
        self, output: DecoderOutput, targets: Tensor, scale: StepScale, step_counts: Tensor | None = None
    ) -> LossParts:
        """This micro-batch's parts; ``step_counts`` come from the counting pass, where one was needed."""
        token = self.token_loss_sum(output.logits, targets) / scale.num_targets
        routing, balance, z = self.routing(output, scale, step_counts)
        return LossParts(token + routing, token.detach(), balance, z)

    def token_loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy of this rank's tokens, in nats; ``targets`` (rows, seq / cp)."""
        if self.mesh.tp > 1:
            return vocabulary_loss_sum(logits, targets, self.mesh)
        return token_loss_sum(logits, targets)

    def routing(
        self, output: DecoderOutput, scale: StepScale, step_counts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(what the router losses add to the loss, balance, z) of the sparse layers of ``output``."""
        if output.stats is None:
            zero = output.logits.new_zeros((), dtype=torch.float32)
            return zero, zero, zero
        z_sums = as_whole_rows(output.stats.z_sums, output.shares)
        z = z_loss(z_sums, total_tokens=scale.total_tokens, num_layers=self.num_layers)
        balance = self._balance(output, scale, step_counts)
        added = self.aux_coefficient * balance + self.spec.z_coefficient * z
        return added, balance.detach(), z.detach()

    def _balance(self, output: DecoderOutput, scale: StepScale, step_counts: Tensor | None) -> Tensor:
        pool = pool_tokens(self.spec.scope, scale.seq_len, scale.global_rows, scale.micro_batches)
        counts = self.pooled_counts(output.stats.counts) if step_counts is None else step_counts
        if step_counts is None and self.spec.scope == "global_batch" and scale.micro_batches > 1:
            pool //= scale.micro_batches  # no gradient is asked: report the mean over micro-batches
        return balance_loss(
            as_whole_rows(output.stats.prob_sums, output.shares),
            as_whole_rows(counts, output.shares),
            pool_tokens=pool,
            total_tokens=scale.total_tokens,
            slots_per_token=self.slots_per_token,
            num_layers=self.num_layers,
        )
