"""The sparse decoder: every decoder-only family of the zoo is this module with other numbers.

Letters: L sparse layers, B rows, E experts.
"""

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_zoo.layers.attention import GroupedQueryAttention, KeyValueCache
from moe_zoo.layers.block import DecoderBlock, ShortcutBlock
from moe_zoo.layers.experts import Experts
from moe_zoo.layers.feed_forward import FeedForward
from moe_zoo.layers.latent_attention import LatentAttention
from moe_zoo.layers.moe import MoELayer
from moe_zoo.layers.norm import make_norm
from moe_zoo.layers.router import RouterStats, TopKRouter
from moe_zoo.ops.experts import Unit
from moe_zoo.ops.rope import places_of
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import LatentAttentionSpec, RelativeAttentionSpec
from moe_zoo.spec.feed_forward import FeedForwardSpec


class DecoderOutput(NamedTuple):
    """Logits (batch, seq, vocab) and router statistics with a leading layer dimension; None where no layer is sparse.

    A stage that is not the last gives hidden states (batch, seq, d_model) in place of logits.
    """

    logits: Tensor
    stats: RouterStats | None
    shares: Tensor | None = None  # (L,) of a row's tokens, those that each sparse layer sees; None: all of them


class SparseDecoder(nn.Module):
    """Embedding, blocks, norm, head. Written for one device; ``moe_zoo.parallel`` edits it from outside.

    ``blocks`` makes it one stage of a pipeline: the embedding belongs to the first block, norm and head to the last.
    Names of parameters are those of the whole model.
    """

    def __init__(self, architecture: Architecture, blocks: range | None = None):
        super().__init__()
        self.architecture = arch = architecture
        blocks = range(arch.num_layers) if blocks is None else blocks
        is_first, is_last = blocks.start == 0, blocks.stop == arch.num_layers
        self.embed = nn.Embedding(arch.vocab_size, arch.d_model) if is_first else None
        self.layers = nn.ModuleDict({str(layer): make_block(arch, layer) for layer in blocks})
        self.norm = make_norm(arch.norm, arch.d_model, arch.norm_eps) if is_last else None
        self.head = nn.Linear(arch.d_model, arch.vocab_size, bias=arch.head_bias) if is_last else None
        if arch.tie_embeddings and is_first and is_last:
            self.head.weight = self.embed.weight

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        row_seeds: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> DecoderOutput:
        """``input_ids`` and ``positions`` (batch, seq); ``mask`` (batch, 1, seq, keys), None is causal.

        A stage that is not the first takes hidden states (batch, seq, d_model) in place of ids, and needs positions.
        """
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        arch = self.architecture
        places = {spec: places_of(positions, spec) for spec in arch.attentions.values()}
        hidden, stats = input_ids if self.embed is None else _times(arch.embedding_scale, self.embed(input_ids)), []
        for name, layer in self.layers.items():
            hidden, layer_stats = layer(hidden, places[arch.attention_of(int(name))], mask, row_seeds, cache)
            if layer_stats is not None:
                stats.append(layer_stats)
        stacked = RouterStats(*map(torch.stack, zip(*stats, strict=True))) if stats else None
        if self.head is None:
            return DecoderOutput(hidden, stacked)
        logits = self.head(self.norm(hidden))
        return DecoderOutput(logits if arch.logit_divisor == 1.0 else logits / arch.logit_divisor, stacked)

    def wire_shapes(self, rows: int, seq_len: int) -> tuple[tuple[int, ...], ...]:
        """Of what one stage hands to the next: here hidden states alone."""
        return ((rows, seq_len, self.architecture.d_model),)


def make_block(arch: Architecture, layer: int) -> DecoderBlock | ShortcutBlock:
    """Block ``layer`` of the model, its weights not yet initialised."""
    if arch.shortcut:
        first, second = (_around(arch, layer, make_ffn(arch.d_model, arch.feed_forward), place) for place in (0, 1))
        return ShortcutBlock(first, second, make_moe(arch, layer))
    return _around(
        arch, layer, make_moe(arch, layer) if arch.is_sparse(layer) else make_ffn(arch.d_model, arch.feed_forward)
    )


def _around(arch: Architecture, layer: int, feed_forward: nn.Module, place: int = 0) -> DecoderBlock:
    norms = (make_norm(arch.norm, arch.d_model, arch.norm_eps) for _ in range(2))
    return DecoderBlock(make_attention(arch, layer, place), feed_forward, *norms, scale=arch.residual_scale)


def make_attention(arch: Architecture, layer: int, place: int = 0) -> nn.Module:
    """The attention of block ``layer``, of two the one at ``place``; in a cache all of them stand in one row."""
    spec, entry = arch.attention_of(layer), arch.attentions_per_block * layer + place
    if isinstance(spec, LatentAttentionSpec):
        return LatentAttention(arch.d_model, spec, layer=entry)
    return GroupedQueryAttention(arch.d_model, spec, norm_eps=arch.norm_eps, layer=entry)


def make_moe(arch: Architecture, layer: int) -> MoELayer:
    """The sparse feed-forward of block ``layer``."""
    moe = arch.moe
    router = TopKRouter(arch.d_model, **dataclasses.asdict(moe.router), layer=layer)  # the same names in both
    spec = moe.experts
    experts = Experts(moe.router.num_experts, arch.d_model, spec.d_ff, make_unit(spec), spec.bias)
    shared = make_ffn(arch.d_model, moe.shared) if moe.shared else None
    return MoELayer(router, experts, shared, nn.Linear(arch.d_model, 1, bias=False) if moe.shared_gate else None)


def make_ffn(d_model: int, spec: FeedForwardSpec) -> FeedForward:
    """A dense feed-forward from its numbers."""
    return FeedForward(d_model, spec.d_ff, make_unit(spec), spec.bias)


def make_unit(spec: FeedForwardSpec) -> Unit:
    """What stands between the matrices of a feed-forward."""
    return Unit(spec.activation, spec.gated, spec.limit, spec.up_offset)


def _times(scale: float, x: Tensor) -> Tensor:
    return x if scale == 1.0 else x * scale


def init_std(name: str, arch: Architecture) -> float | None:
    """Standard deviation of a parameter's initial values; None for norms, which start as the identity, and biases.

    Matrices that write to the residual stream are scaled by 1 / sqrt(their number), 2 a layer (GPT-2, section 2.3), queries
    whose scores are not scaled by 1 / sqrt(head_dim) (T5, arXiv:1910.10683).
    """
    if "norm" in name or name.endswith("bias"):
        return None
    if isinstance(arch.attention, RelativeAttentionSpec) and name.endswith("attention.query.weight"):
        return arch.init_std / math.sqrt(arch.attention.head_dim)
    writes_residual = name.endswith(("attention.out.weight", "down.weight", "w_down"))
    return arch.init_std / math.sqrt(arch.residual_writes) if writes_residual else arch.init_std
