"""Context parallelism: a row is split over the cp ranks, and only attention looks across.

``gather``: rank r holds the chunks r and 2 cp - 1 - r of a row cut in 2 cp, so that causal work is even (Llama 3,
arXiv:2407.21783, section 3.3.2); keys and values of the whole row come to each rank, whose backward gives their
gradients back. ``ulysses``: rank r holds chunk r of cp; heads are exchanged for positions around attention
(arXiv:2309.14509). Both see the document mask of the whole row.

Letters: B rows, H heads, S positions, d head width.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_zoo.comm.collectives import gather, swap
from moe_zoo.comm.mesh import Mesh
from moe_zoo.layers.attention import GroupedQueryAttention
from moe_zoo.layers.latent_attention import LatentAttention
from moe_zoo.layers.relative import RelativeAttention, RelativeBias
from moe_zoo.layers.router import TopKRouter
from moe_zoo.models.switch import Network
from moe_zoo.ops.attention import attend
from moe_zoo.ops.documents import PackedRows, document_mask
from moe_zoo.ops.relative import attend_biased


class RowSplit:
    """Which tokens of a row this rank has: its cp columns at the model's ends, its tp part of those between layers."""

    def __init__(self, mesh: Mesh, method: str):
        self.mesh = mesh
        self.num_chunks = (2 if method == "gather" else 1) * mesh.cp if mesh.cp > 1 else 1
        self.keeps_whole_mask = method == "ulysses"
        self.num_tokens: int | None = None  # of a row that is padded to the granule; None: rows are full

    @property
    def granule(self) -> int:
        """A row's length is a multiple of it."""
        return self.num_chunks * self.mesh.tp

    def order(self, seq_len: int, device: torch.device) -> Tensor:
        """(seq,) places in a row, in the order in which ranks hold them."""
        chunks = torch.arange(seq_len, device=device).chunk(self.num_chunks)
        ranks = range(self.mesh.cp)
        if self.num_chunks == 2 * self.mesh.cp > 2:
            return torch.cat([chunks[i] for r in ranks for i in (r, 2 * self.mesh.cp - 1 - r)])
        return torch.cat(chunks)

    def columns(self, seq_len: int, device: torch.device) -> Tensor:
        """(seq / cp,) places that this rank and its tp peers have."""
        return self.order(seq_len, device).chunk(self.mesh.cp)[self.mesh.cp_rank]

    def places(self, num_local: int, device: torch.device) -> Tensor:
        """(seq / (cp tp),) places that this rank has between layers."""
        columns = self.columns(num_local * self.mesh.cp * self.mesh.tp, device)
        return columns.chunk(self.mesh.tp)[self.mesh.tp_rank]

    def pairs(self, num_local: int, num_heads: int, device: torch.device) -> tuple[Tensor, Tensor, slice]:
        """(places of queries, places of keys, heads) that meet in this rank's attention; heads are of its tp part."""
        whole = torch.arange(num_local * self.mesh.cp * self.mesh.tp, device=device)
        if self.mesh.cp == 1 or not self.keeps_whole_mask:
            return self.columns(len(whole), device), whole, slice(num_heads)
        own = num_heads // self.mesh.cp
        return whole, whole, slice(self.mesh.cp_rank * own, (self.mesh.cp_rank + 1) * own)

    def gathered(self, x_BS: Tensor) -> Tensor:
        """Of the whole rows, in row order, without padding. No gradient."""
        whole = gather(x_BS.detach(), 1, self.mesh.seq_group)
        return whole[:, self.order(whole.shape[1], x_BS.device).argsort()[: self.num_tokens]]

    def own_view(self, positions_BS: Tensor) -> tuple[Tensor, Tensor | None]:
        """(positions, mask) of this rank's queries, from the positions of whole rows."""
        mask = document_mask(positions_BS)
        if self.mesh.cp == 1:
            return positions_BS, mask
        columns = self.columns(positions_BS.shape[1], positions_BS.device)
        if mask is not None and not self.keeps_whole_mask:
            mask = mask[:, :, columns]
        return positions_BS[:, columns], mask

    def own(self, rows: PackedRows) -> PackedRows:
        """This rank's columns of whole rows; of an encoder's part and a decoder's, each by itself."""
        if self.mesh.cp == 1:
            return rows
        encoder_ids = rows.encoder_ids
        if encoder_ids is not None:
            encoder_ids = encoder_ids[:, self.columns(encoder_ids.shape[1], encoder_ids.device)]
        columns = self.columns(rows.input_ids.shape[1], rows.input_ids.device)
        own = rows.input_ids[:, columns], rows.targets[:, columns]
        return PackedRows(*own, *self.own_view(rows.positions), encoder_ids)


def split_rows(model: Network, mesh: Mesh, method: str) -> None:
    """Let routers and attention know that rows are split, in place."""
    split = RowSplit(mesh, method)
    for module in model.modules():
        if isinstance(module, TopKRouter) and mesh.cp * mesh.tp > 1:
            module.rows = RowSplit(mesh, method)  # one each: the rows of an encoder are never padded
        if isinstance(module, GroupedQueryAttention | LatentAttention) and mesh.cp > 1:
            module.attend = partial(gathered_attend if method == "gather" else ulysses_attend, split=split)
        if isinstance(module, RelativeBias) and mesh.cp * mesh.tp > 1:
            module.view = split
        if isinstance(module, RelativeAttention) and mesh.cp > 1:
            module.attend = partial(gathered_biased if method == "gather" else ulysses_biased, split=split)


def gathered_attend(
    q_BHSd: Tensor,
    k_BHSd: Tensor,
    v_BHSd: Tensor,
    mask: Tensor | None,
    *,
    split: RowSplit,
    reach_BS: Tensor | None = None,
    **how: Any,
) -> Tensor:
    """Own queries, keys of the whole row; a chunk of queries is not even shown the keys behind it."""
    keys_values = gather(torch.cat((k_BHSd, v_BHSd), dim=-1), 2, split.mesh.cp_group)
    seq_len = keys_values.shape[2]
    in_order = split.order(seq_len, q_BHSd.device).argsort()
    k_BHSd, v_BHSd = keys_values.index_select(2, in_order).split((k_BHSd.shape[-1], v_BHSd.shape[-1]), dim=-1)
    outs, size = [], seq_len // split.num_chunks
    for half, chunk in enumerate((split.mesh.cp_rank, split.num_chunks - 1 - split.mesh.cp_rank)):
        own, end = slice(half * size, (half + 1) * size), (chunk + 1) * size
        seen = None if mask is None else mask[:, :, own, :end]
        reach = None if reach_BS is None else reach_BS[:, own]
        outs.append(attend(q_BHSd[:, :, own], k_BHSd[:, :, :end], v_BHSd[:, :, :end], seen, reach_BS=reach, **how))
    return torch.cat(outs, dim=2)


def ulysses_attend(
    q_BHSd: Tensor,
    k_BHSd: Tensor,
    v_BHSd: Tensor,
    mask: Tensor | None,
    *,
    split: RowSplit,
    sinks_H: Tensor | None = None,
    reach_BS: Tensor | None = None,
    **how: Any,
) -> Tensor:
    """Some heads of the whole row in place of all heads of a part; key heads too few for the ranks are repeated."""
    ranks, group = split.mesh.cp, split.mesh.cp_group
    repeats = max(1, ranks // k_BHSd.shape[1])
    keys = (x.repeat_interleave(repeats, dim=1) for x in (k_BHSd, v_BHSd))
    whole = (swap(x, 1, 2, group) for x in (q_BHSd, *keys))
    own_sinks = None if sinks_H is None else sinks_H.chunk(ranks)[split.mesh.cp_rank]
    reach = None if reach_BS is None else gather(reach_BS, 1, group)
    return swap(attend(*whole, mask, sinks_H=own_sinks, reach_BS=reach, **how), 2, 1, group)


def gathered_biased(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor, bias: Tensor | None, *, split: RowSplit) -> Tensor:
    """Own queries, keys of the whole row, in the order in which ``bias`` has them."""
    keys_values = gather(torch.cat((k_BHSd, v_BHSd), dim=-1), 2, split.mesh.cp_group)
    in_order = split.order(keys_values.shape[2], q_BHSd.device).argsort()
    k_BHSd, v_BHSd = keys_values.index_select(2, in_order).split((k_BHSd.shape[-1], v_BHSd.shape[-1]), dim=-1)
    return attend_biased(q_BHSd, k_BHSd, v_BHSd, bias)


def ulysses_biased(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor, bias: Tensor | None, *, split: RowSplit) -> Tensor:
    """Some heads of the whole row, those of ``bias``, in place of all heads of a part."""
    whole = (swap(x, 1, 2, split.mesh.cp_group) for x in (q_BHSd, k_BHSd, v_BHSd))
    return swap(attend_biased(*whole, bias), 2, 1, split.mesh.cp_group)
