"""Tensor and sequence parallelism: heads, hidden units and vocabulary are cut; between layers each rank has its tokens.

Between layers hidden states are (rows, seq / (cp tp), d_model). An attention or feed-forward layer gathers its input
along the row over tp, works on its heads or hidden units, and reduce-scatters its output: the two are each other's
adjoints, so gradients need no rule of their own. Norms and routers see each token once.

Letters: B rows, S positions, V vocabulary.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_zoo.comm.collectives import gather, max_over, mean, reduce_scatter
from moe_zoo.comm.mesh import Mesh
from moe_zoo.layers.attention import GroupedQueryAttention
from moe_zoo.layers.feed_forward import FeedForward
from moe_zoo.layers.latent_attention import LatentAttention
from moe_zoo.layers.norm import AllHeadsNorm
from moe_zoo.layers.relative import PositionTables, RelativeAttention
from moe_zoo.models.switch import Network, SparseEncoderDecoder
from moe_zoo.ops.documents import IGNORED
from moe_zoo.parallel.placement import Cut, Slices, run_margins

SLICED = {  # layer -> its parameters: dimension that is cut, kind
    GroupedQueryAttention: {
        "query.weight": (0, "tp"),
        "query.bias": (0, "tp"),
        "key.weight": (0, "kv"),
        "key.bias": (0, "kv"),
        "value.weight": (0, "kv"),
        "value.bias": (0, "kv"),
        "out.weight": (1, "tp"),
        "out.bias": (0, "tp"),
        "sinks": (0, "tp"),
    },
    LatentAttention: {
        "query.weight": (0, "tp"),
        "key_value.weight": (0, "tp"),
        "out.weight": (1, "tp"),
        "out.bias": (0, "tp"),
    },
    RelativeAttention: {
        "query.weight": (0, "tp"),
        "key.weight": (0, "tp"),
        "value.weight": (0, "tp"),
        "out.weight": (1, "tp"),
    },
    FeedForward: {
        "gate.weight": (0, "tp"),
        "gate.bias": (0, "tp"),
        "up.weight": (0, "tp"),
        "up.bias": (0, "tp"),
        "down.weight": (1, "tp"),
        "down.bias": (0, "tp"),
    },
}
LAST = {
    GroupedQueryAttention: "out",
    LatentAttention: "out",
    RelativeAttention: "out",
    FeedForward: "down",
}  # whose outputs are summed over ranks
POSITION_TABLES = {"encoder": (1, "tp"), "decoder": (1, "tp")}
NORMS_ALL_HEADS = {"query_norm.weight": (0, "tp"), "key_norm.weight": (0, "kv")}


class VocabularySlice(nn.Embedding):
    """A run of the rows of an embedding. Ids of others give zeros: the sum over ranks is the whole look-up."""

    def __init__(self, whole: nn.Embedding, mesh: Mesh):
        super().__init__(whole.num_embeddings // mesh.tp, whole.embedding_dim, device="meta")
        self.group, self.first = mesh.tp_group, mesh.tp_rank * self.num_embeddings

    def forward(self, *ids: Tensor) -> Tensor | tuple[Tensor, ...]:
        """(rows, seq / cp) ids -> (rows, seq / (cp tp), d_model), of each."""
        embedded = tuple(map(self._look_up, ids))
        return embedded if len(ids) > 1 else embedded[0]

    def _look_up(self, input_ids: Tensor) -> Tensor:
        local = input_ids - self.first
        is_here = (local >= 0) & (local < self.num_embeddings)
        return reduce_scatter(super().forward(local * is_here) * is_here[..., None], 1, self.group)


def split_tensors(model: Network, mesh: Mesh) -> Slices:
    """Put the collectives around the layers, in place; what becomes of the weights is returned."""
    if mesh.tp == 1:
        return {}
    slices: Slices = {}
    for path, layer in model.named_modules():
        if type(layer) in SLICED:
            slices |= _slices(path, SLICED[type(layer)], _cuts(layer, mesh))
            _add_own_run_of_bias(getattr(layer, LAST[type(layer)]), mesh)
            _gather_before(layer, mesh)
            _scatter_after(layer, mesh)
        if isinstance(layer, GroupedQueryAttention) and layer.norms_all_heads:
            slices |= _slices(path, NORMS_ALL_HEADS, _cuts(layer, mesh))
        if isinstance(layer, PositionTables):
            slices |= _slices(path, POSITION_TABLES, _cuts(layer, mesh))
        if isinstance(layer, AllHeadsNorm):
            layer.average = partial(mean, group=mesh.tp_group)
    if isinstance(model, SparseEncoderDecoder):
        model.heads_here //= mesh.tp
    vocabulary = Cut(0, mesh.tp, mesh.tp_rank)
    if model.head is not None:
        _gather_before(model.head, mesh)
        slices["head.weight"] = slices["head.bias"] = ("tp", (vocabulary,))
    if model.embed is not None:
        is_tied = model.head is not None and model.head.weight is model.embed.weight
        model.embed = VocabularySlice(model.embed, mesh)
        slices["embed.weight"] = ("tp", (vocabulary,))
        if is_tied:
            model.head.weight = model.embed.weight
    return slices


def _cuts(layer: nn.Module, mesh: Mesh) -> dict[str, tuple[int, int]]:
    """(parts, own part) of what is cut. Where key heads are fewer than ranks, some ranks hold the same ones."""
    has_own_keys = isinstance(layer, GroupedQueryAttention) and layer.spec.num_kv_heads >= mesh.tp
    whole = (mesh.tp, mesh.tp_rank)
    return {"tp": whole, "kv": whole if has_own_keys else (mesh.kv_parts, mesh.kv_rank)}


def _slices(path: str, rules: dict[str, tuple[int, str]], cuts: dict[str, tuple[int, int]]) -> Slices:
    return {
        f"{path}.{name}": ("tp" if cuts[kind] == cuts["tp"] else kind, (Cut(dim, *cuts[kind]),))
        for name, (dim, kind) in rules.items()
    }


def _add_own_run_of_bias(last: nn.Linear, mesh: Mesh) -> None:
    """Each rank adds its run of the bias to its part of the sum, and zeros elsewhere: all of it is added once."""
    if last.bias is None:
        return
    margins = run_margins(last.out_features, mesh.tp, mesh.tp_rank)
    last.forward = lambda x: F.linear(x, last.weight, F.pad(last.bias, margins))


def _gather_before(layer: nn.Module, mesh: Mesh) -> None:
    def gathered(_, inputs):
        # What a decoder reads of its encoder is split along the row as well.
        num_rows = 2 if isinstance(layer, RelativeAttention) and inputs[1] is not None else 1
        return (*(gather(x, 1, mesh.tp_group) for x in inputs[:num_rows]), *inputs[num_rows:])

    layer.register_forward_pre_hook(gathered)


def _scatter_after(layer: nn.Module, mesh: Mesh) -> None:
    layer.register_forward_hook(lambda _, __, output: reduce_scatter(output, 1, mesh.tp_group))


def vocabulary_loss_sum(logits_BSV: Tensor, targets_BS: Tensor, mesh: Mesh) -> Tensor:
    """Summed cross-entropy of this rank's tokens, in fp32 at least; each rank has a run of the vocabulary.

    ``log sum exp`` is summed over ranks after the largest logit of all is taken off. One reduce-scatter along the row
    carries both sums, and leaves every token's loss on one rank. Source: Megatron-LM, arXiv:1909.08053, section 3.
    """
    logits_BSV = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
    shifted_BSV = logits_BSV - max_over(logits_BSV.amax(-1, keepdim=True), mesh.tp_group)
    num_here = logits_BSV.shape[-1]
    local_BS = targets_BS - mesh.tp_rank * num_here
    is_here_BS = (local_BS >= 0) & (local_BS < num_here)
    picked_BS = shifted_BSV.gather(-1, (local_BS * is_here_BS)[..., None])[..., 0] * is_here_BS
    sums = torch.stack((shifted_BSV.exp().sum(-1), picked_BS))
    totals_BS, picked_BS = reduce_scatter(sums, 2, mesh.tp_group)
    counts_BS = targets_BS.chunk(mesh.tp, dim=1)[mesh.tp_rank] != IGNORED
    return ((totals_BS.log() - picked_BS) * counts_BS).sum()
