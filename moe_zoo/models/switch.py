"""The sparse encoder-decoder of the Switch paper (arXiv:2101.03961): a T5 (arXiv:1910.10683) whose blocks hold experts.

Its blocks are numbered through, the encoder's first, so that whatever cuts, recomputes or counts blocks takes it as it
takes a decoder. What stages hand on is (the encoder's hidden states, the decoder's, the tables of relative positions):
the decoder's tokens are embedded where the vocabulary is and wait there, and the tables, owned by the first stage alone,
travel with them, so that their gradients come home by themselves.
"""

from functools import partial

import torch
from torch import Tensor, nn

from moe_zoo.layers.norm import make_norm
from moe_zoo.layers.relative import PositionTables, RelativeAttention, RelativeBias, RelativeBlock, TwoCaches
from moe_zoo.layers.router import RouterStats
from moe_zoo.models.decoder import DecoderOutput, SparseDecoder, make_ffn, make_moe
from moe_zoo.spec.architecture import Architecture

Halves = tuple[Tensor, ...]  # ids of both halves, or what a stage hands on


class Vocabulary(nn.Embedding):
    """An embedding of several texts in one call, so that whatever gathers its weights does it once."""

    def forward(self, *ids: Tensor) -> Tensor | tuple[Tensor, ...]:
        """(batch, seq) ids -> (batch, seq, d_model), of each."""
        embedded = tuple(super(Vocabulary, self).forward(text) for text in ids)
        return embedded if len(ids) > 1 else embedded[0]


class SparseEncoderDecoder(nn.Module):
    """Embedding, encoder, its norm, decoder, norm, head. Written for one device; ``moe_zoo.parallel`` edits it.

    ``blocks`` makes it one stage of a pipeline: embedding and position tables belong to the first block, the encoder's
    norm to the encoder's last, norm and head to the last of all. Names of parameters are those of the whole model.
    """

    def __init__(self, architecture: Architecture, blocks: range | None = None):
        super().__init__()
        self.architecture = arch = architecture
        blocks = range(arch.num_layers) if blocks is None else blocks
        is_first, is_last = blocks.start == 0, blocks.stop == arch.num_layers
        spec, self.num_encoder_layers = arch.attention, arch.num_encoder_layers
        self.embed = Vocabulary(arch.vocab_size, arch.d_model) if is_first else None
        self.tables = PositionTables(spec.buckets, spec.num_heads) if is_first else None
        self.encoder_bias, self.decoder_bias = (RelativeBias(spec.max_distance, is_causal=c) for c in (False, True))
        self.layers = nn.ModuleDict({str(layer): make_relative_block(arch, layer) for layer in blocks})
        ends_encoder = self.num_encoder_layers - 1 in blocks
        self.encoder_norm = make_norm(arch.norm, arch.d_model, arch.norm_eps) if ends_encoder else None
        self.norm = make_norm(arch.norm, arch.d_model, arch.norm_eps) if is_last else None
        self.head = nn.Linear(arch.d_model, arch.vocab_size, bias=False) if is_last else None
        if arch.tie_embeddings and is_first and is_last:
            self.head.weight = self.embed.weight
        self.heads_here = spec.num_heads  # ``moe_zoo.parallel`` cuts them

    def forward(
        self,
        x: Halves,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        row_seeds: Tensor | None = None,
    ) -> DecoderOutput:
        """``x``: ids (batch, encoder's seq) and (batch, decoder's seq); in a stage that is not the first what the one
        before it handed on. ``positions`` are what a decoder asks for; here they follow from the places in a half.
        """
        assert mask is None, "documents in a row of an encoder-decoder are not told apart"
        encoded, decoded, tables = (*self.embed(*x), self.tables()) if self.embed is not None else x
        shares = [part.shape[1] / (encoded.shape[1] + decoded.shape[1]) for part in (encoded, decoded)]
        sparse, seen = [], []
        biases = self._biases(tables, encoded.shape[1], decoded.shape[1])
        for number, layer in self.layers.items():
            in_decoder = int(number) >= self.num_encoder_layers
            if in_decoder:
                decoded, stats = layer(decoded, encoded, biases[1], None, row_seeds, None)
            else:
                encoded, stats = layer(encoded, None, biases[0], None, row_seeds, None)
            if int(number) + 1 == self.num_encoder_layers:
                encoded = self.encoder_norm(encoded)
            if stats is not None:
                sparse.append(stats)
                seen.append(shares[in_decoder])
        stacked = RouterStats(*map(torch.stack, zip(*sparse, strict=True))) if sparse else None
        out = (encoded, decoded, tables) if self.head is None else self._logits(decoded)
        return DecoderOutput(out, stacked, torch.tensor(seen, device=decoded.device) if seen else None)

    def encode(self, input_ids: Tensor, key_bias: Tensor | None = None) -> Tensor:
        """Ids (batch, seq) -> what the decoder reads, (batch, seq, d_model). ``key_bias`` hides padding."""
        hidden = self.embed(input_ids)
        bias = self.encoder_bias(self.tables()[0], input_ids.shape[1])
        bias = bias if key_bias is None else bias + key_bias
        for number in range(self.num_encoder_layers):
            hidden, _ = self.layers[str(number)](hidden, None, bias, None, None, None)
        return self.encoder_norm(hidden)

    def decode(
        self,
        input_ids: Tensor,
        memory: Tensor,
        *,
        key_bias: Tensor | None = None,
        memory_bias: Tensor | None = None,
        cache: TwoCaches | None = None,
        num_past: int = 0,
    ) -> Tensor:
        """Logits (batch, seq, vocab) of the decoder's ids, of which ``num_past`` earlier ones are in ``cache``."""
        hidden = self.embed(input_ids)
        bias = self.decoder_bias(self.tables()[1], input_ids.shape[1], num_past)
        bias = bias if key_bias is None else bias + key_bias
        for number in range(self.num_encoder_layers, self.architecture.num_layers):
            hidden, _ = self.layers[str(number)](hidden, memory, bias, memory_bias, None, cache)
        return self._logits(hidden)

    def wire_shapes(self, rows: int, encoder_len: int, decoder_len: int) -> tuple[tuple[int, ...], ...]:
        """Of what one stage hands to the next."""
        spec, width = self.architecture.attention, self.architecture.d_model
        return (rows, encoder_len, width), (rows, decoder_len, width), (2, spec.buckets, self.heads_here)

    def _biases(self, tables: Tensor, encoder_len: int, decoder_len: int) -> tuple[Tensor | None, Tensor | None]:
        """Of the halves that have a block here."""
        first, *_, last = [*map(int, self.layers)] * 2  # there may be but one
        return (
            self.encoder_bias(tables[0], encoder_len) if first < self.num_encoder_layers else None,
            self.decoder_bias(tables[1], decoder_len) if last >= self.num_encoder_layers else None,
        )

    def _logits(self, hidden: Tensor) -> Tensor:
        hidden = self.norm(hidden)
        # Embeddings have entries of size one (T5); a head that is their copy would give logits sqrt(d_model) too large.
        scale = self.architecture.d_model**-0.5 if self.architecture.tie_embeddings else 1.0
        return self.head(hidden * scale)


def make_relative_block(arch: Architecture, layer: int) -> RelativeBlock:
    """Block ``layer`` of the model, its weights not yet initialised."""
    spec = arch.attention
    # In a cache the decoder's layers count from 0.
    place, in_decoder = layer - arch.num_encoder_layers, layer >= arch.num_encoder_layers
    attention, cross = (RelativeAttention(arch.d_model, spec.num_heads, spec.head_dim, layer=place) for _ in range(2))
    feed_forward = make_moe(arch, layer) if arch.is_sparse(layer) else make_ffn(arch.d_model, arch.feed_forward)
    extra = make_ffn(arch.d_model, arch.feed_forward) if arch.has_extra_ffn(layer) else None
    norm = partial(make_norm, arch.norm, arch.d_model, arch.norm_eps)
    return RelativeBlock(attention, cross if in_decoder else None, feed_forward, extra, norm)


Network = SparseDecoder | SparseEncoderDecoder


def make_network(architecture: Architecture, blocks: range | None = None) -> Network:
    """The module of an architecture, or of some of its ``blocks``; weights not yet initialised."""
    kind = SparseEncoderDecoder if architecture.encoder else SparseDecoder
    return kind(architecture, blocks)
