"""Parameters, FLOPs and bytes of a model, by arithmetic on its Architecture alone.

Letters: D model width, F expert width, E experts, K choices, H heads, S sequence, V vocabulary, L layers.
"""

from typing import NamedTuple

from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import AttentionSpec, LatentAttentionSpec, RelativeAttentionSpec
from moe_zoo.spec.feed_forward import FeedForwardSpec, MoESpec

# bf16: weight 2, gradient 2, master and moments 12; fp32: 4 of each. Source: ZeRO, arXiv:1910.02054, section 3.1.
TRAINING_BYTES_PER_PARAMETER = 16


class Parameters(NamedTuple):
    """Parameters by where they sit, over all layers. A router's selection bias is a buffer and not counted."""

    embedding: int  # V D
    attention: int  # q, k, v, o, their biases, the qk-norms and sinks; of a decoder on its encoder too, and both tables
    norms: int  # two per attention and the final one; a third in blocks that read an encoder, which ends in one as well
    feed_forward: int  # of the dense layers, and those behind or beside sparse ones
    router: int  # a row of D per expert that is scored
    experts: int  # all of them
    shared: int
    head: int  # V D, or 0 where tied to the embedding, and its bias

    @property
    def total(self) -> int:
        return sum(self)


def parameters(architecture: Architecture) -> Parameters:
    """What ``sum(p.numel() for p in model.parameters())`` gives, by part."""
    D, L = architecture.d_model, architecture.num_layers
    moe, num_sparse = architecture.moe, len(architecture.sparse_layers)
    vocabulary, attentions = architecture.vocab_size * D, architecture.attentions_per_block
    norm = D if architecture.norm == "rmsnorm" else 2 * D
    extra = sum(map(architecture.has_extra_ffn, range(L)))
    reading = L - architecture.num_encoder_layers if architecture.encoder else 0  # blocks that read an encoder
    return Parameters(
        embedding=vocabulary,
        attention=attentions * sum(_attention(architecture.attention_of(layer), D) for layer in range(L))
        + reading * _attention(architecture.attention, D)
        + position_tables(architecture),
        norms=(2 * attentions * L + 1 + (reading + 1 + extra if architecture.encoder else 0)) * norm,
        feed_forward=(architecture.num_dense + extra) * _ffn(architecture.feed_forward, D),
        router=num_sparse * moe.router.num_scored * (D + moe.router.bias) if moe else 0,
        experts=num_sparse * moe.router.num_experts * _ffn(moe.experts, D) if moe else 0,
        shared=num_sparse * (_ffn(moe.shared, D) + D * moe.shared_gate) if moe and moe.shared else 0,
        head=(0 if architecture.tie_embeddings else vocabulary) + architecture.head_bias * architecture.vocab_size,
    )


def num_parameters(architecture: Architecture) -> int:
    """Every trained number of the model."""
    return parameters(architecture).total


def num_active_parameters(architecture: Architecture) -> int:
    """The parameters one token meets: K of the E experts per sparse layer, and all else, embeddings included.

    Where some of the K are experts without weights, on average over even choices.
    """
    counts = parameters(architecture)
    return counts.total - counts.experts + _active_experts(architecture, counts)


def forward_flops_per_token(architecture: Architecture, seq_len: int, encoder_len: int = 0) -> int:
    """FLOPs of one token in a forward pass. Of an encoder-decoder: of a row, over its ``seq_len`` tokens.

    ``2 * (matrix parameters the token is multiplied with) + 4 L S H head_dim``: an element of a matrix costs one
    multiply and one add; scores and their use on the values cost ``2 S H head_dim`` each (in a window's S), with no discount
    for the causal mask. Norms, activations, rotations and the embedding's look-up are not counted, dropped tokens are not
    subtracted. An expert without weights costs nothing, and gets its even share of the choices. Source: PaLM,
    arXiv:2204.02311, appendix B, of which this is a third (it counts the backward pass).
    """
    layers = range(architecture.num_layers)
    blocks = (block_flops_per_token(architecture, layer, seq_len, encoder_len) for layer in layers)
    return sum(blocks) + head_flops_per_token(architecture, seq_len, encoder_len)


def block_flops_per_token(architecture: Architecture, layer: int, seq_len: int, encoder_len: int = 0) -> int:
    """Forward FLOPs of one token in block ``layer``, counted as in ``forward_flops_per_token``."""
    if not architecture.encoder:
        return _block_flops(architecture, layer, seq_len)
    decoder_len, spec = seq_len - encoder_len, architecture.attention
    if layer < architecture.num_encoder_layers:
        return encoder_len * _block_flops(architecture, layer, encoder_len) // seq_len
    # Queries and outputs of the decoder's tokens, keys and values of the encoder's, and all of these on all of those.
    matrices = attention_matrices(spec, architecture.d_model) // 2 * seq_len
    scores = decoder_len * encoder_len * spec.num_heads * (spec.head_dim + spec.value_width)
    own = decoder_len * _block_flops(architecture, layer, decoder_len)
    return (own + 2 * matrices + 2 * scores) // seq_len


def _block_flops(architecture: Architecture, layer: int, seq_len: int) -> int:
    """Of one token of a row that attends to itself."""
    D, attention, moe = architecture.d_model, architecture.attention_of(layer), architecture.moe
    attentions = architecture.attentions_per_block
    matrices = attentions * attention_matrices(attention, D)
    if moe and architecture.is_sparse(layer):
        matrices += moe.router.num_scored * D + _slots_ffn(moe, D, seq_len)
        matrices += ffn_matrices(moe.shared, D) if moe.shared else 0
        matrices += ffn_matrices(architecture.feed_forward, D) if architecture.has_extra_ffn(layer) else 0
    if architecture.shortcut or not architecture.is_sparse(layer):
        matrices += attentions * ffn_matrices(architecture.feed_forward, D)
    num_keys = min(seq_len, *(getattr(attention, limit, None) or seq_len for limit in ("window", "chunk")))
    scores = attentions * num_keys * attention.num_heads * (attention.head_dim + attention.value_width)
    return 2 * matrices + 2 * scores


def head_flops_per_token(architecture: Architecture, seq_len: int = 1, encoder_len: int = 0) -> int:
    """Forward FLOPs of one token in the head, which an encoder's tokens never reach."""
    return 2 * architecture.vocab_size * architecture.d_model * (seq_len - encoder_len) // seq_len


def training_flops_per_token(architecture: Architecture, seq_len: int, encoder_len: int = 0) -> int:
    """Forward and backward, the latter twice the former. Recompute is not counted."""
    return 3 * forward_flops_per_token(architecture, seq_len, encoder_len)


def weight_bytes(architecture: Architecture, bytes_per_parameter: int = 2) -> int:
    """Size of the weights alone; 2 bytes for bf16, 4 for fp32."""
    return bytes_per_parameter * num_parameters(architecture)


def training_bytes(architecture: Architecture) -> int:
    """Weights, gradients, master weights and AdamW moments, over all ranks together. No activations."""
    return TRAINING_BYTES_PER_PARAMETER * num_parameters(architecture)


def _attention(spec: AttentionSpec | LatentAttentionSpec | RelativeAttentionSpec, d_model: int) -> int:
    return attention_matrices(spec, d_model) + _attention_vectors(spec, d_model)


def attention_matrices(spec: AttentionSpec | LatentAttentionSpec | RelativeAttentionSpec, d_model: int) -> int:
    """Elements of the matrices of one attention."""
    if isinstance(spec, LatentAttentionSpec):
        return sum(latent_matrices(d_model, spec))
    return d_model * (spec.head_dim + spec.value_width) * (spec.num_heads + spec.num_kv_heads)


def position_tables(architecture: Architecture) -> int:
    """Elements of the two tables of relative positions."""
    spec = architecture.attention
    return 2 * spec.buckets * spec.num_heads if isinstance(spec, RelativeAttentionSpec) else 0


def latent_matrices(d_model: int, spec: LatentAttentionSpec) -> tuple[int, int]:
    """(elements of the matrices that every head shares, of those that belong to heads) of a latent attention."""
    shared = d_model * (spec.kv_rank + spec.rope_dim + (spec.query_rank or 0))
    heads = (spec.query_rank or d_model) * spec.head_dim + spec.kv_rank * (spec.nope_dim + spec.value_dim)
    return shared, spec.num_heads * (heads + spec.value_dim * d_model)


def latent_vectors(spec: LatentAttentionSpec) -> int:
    """Elements of the norms and biases of its narrow vectors."""
    narrow = spec.kv_rank + (spec.query_rank or 0)
    return narrow + spec.bias * (narrow + spec.rope_dim)


def _attention_vectors(spec: AttentionSpec | LatentAttentionSpec | RelativeAttentionSpec, d_model: int) -> int:
    """Biases, qk-norms and sinks of one attention."""
    if isinstance(spec, LatentAttentionSpec):
        return latent_vectors(spec) + spec.bias * d_model
    if isinstance(spec, RelativeAttentionSpec):
        return 0
    keys_values = spec.num_kv_heads * (spec.head_dim + spec.value_width)
    biases = spec.bias * (spec.num_heads * spec.head_dim + keys_values) + spec.out_bias * d_model
    normed = spec.num_heads + spec.num_kv_heads if spec.qk_norm_over == "all" else 2
    return biases + (normed * spec.head_dim if spec.qk_norm else 0) + spec.sinks * spec.num_heads


def ffn_matrices(spec: FeedForwardSpec, d_model: int) -> int:
    """Elements of the matrices of one feed-forward."""
    return (3 if spec.gated else 2) * d_model * spec.d_ff


def ffn_biases(spec: FeedForwardSpec, d_model: int) -> tuple[int, int]:
    """(elements of its biases of hidden units, of its output)."""
    return spec.bias * (2 if spec.gated else 1) * spec.d_ff, spec.bias * d_model


def _ffn(spec: FeedForwardSpec, d_model: int) -> int:
    return ffn_matrices(spec, d_model) + sum(ffn_biases(spec, d_model))


def _slots_ffn(moe: MoESpec, d_model: int, seq_len: int) -> int:
    """Matrix parameters of the experts that a token meets, where experts choose on average over a row."""
    router = moe.router
    with_weights = router.slots_per_token(seq_len) * router.num_experts / router.num_scored
    return round(with_weights * ffn_matrices(moe.experts, d_model))


def _active_experts(architecture: Architecture, counts: Parameters) -> int:
    moe = architecture.moe
    return counts.experts * moe.router.top_k // moe.router.num_scored if moe else 0
