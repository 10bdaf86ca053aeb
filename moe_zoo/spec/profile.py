"""What a person wants to know of a model before loading it: sizes, shape, FLOPs, memory. Arithmetic alone."""

from typing import NamedTuple

from moe_zoo.spec.accounting import (
    forward_flops_per_token,
    num_active_parameters,
    parameters,
    training_flops_per_token,
    weight_bytes,
)
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import AttentionSpec, LatentAttentionSpec, RelativeAttentionSpec
from moe_zoo.spec.feed_forward import FeedForwardSpec, RouterSpec

SEQ_LEN = 4096  # of the FLOPs in tables
WORLDS = (1, 8, 64, 512, 4096)
GIB = 2**30
# Bytes per parameter that a rank keeps whole, and that all ranks share: bf16 weights and gradients, fp32 master weights
# and two moments. Source: ZeRO, arXiv:1910.02054, section 3.1 and figure 1.
ZERO_BYTES = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}


class Profile(NamedTuple):
    """Numbers of a model; bytes of memory hold no activations."""

    total: int
    active: int  # met by one token
    embedding: int  # embedding and head
    layers: int
    sparse_layers: int
    experts: int
    top_k: int
    forward_flops: int  # of one token, in a row of SEQ_LEN, of which an encoder reads half
    training_flops: int
    load_bytes: dict[str, int]  # by dtype
    training_bytes: dict[int, dict[int, int]]  # of one rank: ZeRO stage -> ranks -> bytes


def profile(architecture: Architecture) -> Profile:
    """The numbers of ``architecture``."""
    counts, router = parameters(architecture), architecture.moe.router if architecture.moe else None
    row = (SEQ_LEN, SEQ_LEN // 2 if architecture.encoder else 0)
    return Profile(
        total=counts.total,
        active=num_active_parameters(architecture),
        embedding=counts.embedding + counts.head,
        layers=architecture.num_layers,
        sparse_layers=len(architecture.sparse_layers),
        experts=architecture.num_experts,
        top_k=router.top_k if router else 0,
        forward_flops=forward_flops_per_token(architecture, *row),
        training_flops=training_flops_per_token(architecture, *row),
        load_bytes={"bf16": weight_bytes(architecture, 2), "fp32": weight_bytes(architecture, 4)},
        training_bytes={
            stage: {world: counts.total * own + -(-counts.total * shared // world) for world in WORLDS}
            for stage, (own, shared) in ZERO_BYTES.items()
        },
    )


def shape_rows(architecture: Architecture) -> list[tuple[str, str]]:
    """(what, how) of a table for people."""
    arch, moe = architecture, architecture.moe
    twice = ", each two attentions and two dense feed-forwards beside a sparse one" if arch.shortcut else ""
    rows = [
        ("layers", f"{_layers_text(arch)}{twice}"),
        ("width", f"{arch.d_model:,}"),
        ("vocabulary", f"{arch.vocab_size:,}{', embedding and head tied' if arch.tie_embeddings else ''}"),
        *_attention_rows(arch),
        ("norm", f"{arch.norm}, eps {arch.norm_eps:g}"),
    ]
    if arch.num_dense:
        rows.append(("dense feed-forward", feed_forward_text(arch.feed_forward)))
    if moe is None:
        return rows
    idle = f", {moe.router.zero_experts} that give back what they get" if moe.router.zero_experts else ""
    shared = f" and a shared one of {moe.shared.d_ff:,}{', gated' if moe.shared_gate else ''}" if moe.shared else ""
    return [
        *rows,
        (
            "sparse layers",
            f"{len(arch.sparse_layers)} of {arch.num_layers}, the first is layer {arch.sparse_layers[0]}",
        ),
        ("experts", f"{moe.router.num_experts} of {feed_forward_text(moe.experts)}{idle}{shared}"),
        ("router", router_text(moe.router)),
        ("balance", balance_text(moe.router)),
    ]


def _layers_text(arch: Architecture) -> str:
    if arch.encoder is None:
        return str(arch.num_layers)
    return f"{arch.num_encoder_layers} of an encoder, {arch.num_layers - arch.num_encoder_layers} of a decoder"


def _attention_rows(arch: Architecture) -> list[tuple[str, str]]:
    if arch.local_attention is None:
        return [("attention", attention_text(arch.attention))]
    num_local = len(arch.local_layers)
    return [
        (f"attention of {arch.num_layers - num_local} layers", attention_text(arch.attention)),
        (f"attention of {num_local} layers", attention_text(arch.local_attention)),
    ]


def attention_text(spec: AttentionSpec | LatentAttentionSpec | RelativeAttentionSpec) -> str:
    """One line on a layer's attention."""
    if isinstance(spec, RelativeAttentionSpec):
        return (
            f"{spec.num_heads} heads of {spec.head_dim}; {spec.buckets} buckets of distances up to {spec.max_distance}"
        )
    if isinstance(spec, LatentAttentionSpec):
        ranks = f"keys and values from {spec.kv_rank}" + (
            f", queries from {spec.query_rank}" if spec.query_rank else ""
        )
        return f"latent, {spec.num_heads} heads of {spec.nope_dim} + {spec.rope_dim}, {ranks}; {_rotation_text(spec)}"
    extras = (
        (f"a window of {spec.window}", spec.window),
        (f"chunks of {spec.chunk:,}" if spec.chunk else "", spec.chunk),
        ("sinks", spec.sinks),
        ("qk-norm", spec.qk_norm or spec.qk_unit_norm),
        ("biases", spec.bias or spec.out_bias),
    )
    width = f"{spec.head_dim}" + (f" (values {spec.value_dim})" if spec.value_dim else "")
    parts = [f"{spec.num_heads} heads of {width}, {spec.num_kv_heads} of keys", _rotation_text(spec)]
    return "; ".join([*parts, *(text for text, holds in extras if holds)])


def _rotation_text(spec: AttentionSpec | LatentAttentionSpec) -> str:
    if spec.rotary_width == 0:
        return "no positions"
    part = f" on {spec.rotary_width} of {spec.head_dim}" if spec.rotary_width < spec.head_dim else ""
    scaling = spec.rope_scaling
    return f"rope theta {spec.rope_theta:,.0f}{part}" + (f", {scaling.kind} x {scaling.factor:g}" if scaling else "")


def feed_forward_text(spec: FeedForwardSpec) -> str:
    """One line on a feed-forward."""
    gated = {"silu": "SwiGLU", "gelu": "GEGLU", "relu": "ReGLU"}.get(spec.activation, f"gated {spec.activation}")
    return f"{spec.d_ff:,} ({gated if spec.gated else spec.activation})"


def router_text(spec: RouterSpec) -> str:
    """One line on how tokens and experts find each other."""
    if spec.choice == "expert":
        return f"experts choose, {spec.top_k} per token on average"
    parts = [f"top {spec.top_k} of {spec.num_scored} by {spec.score}"]
    if spec.num_groups > 1:
        parts.append(f"within {spec.groups_per_token} of {spec.num_groups} groups")
    if spec.normalize and spec.top_k > 1:
        parts.append("weights sum to one")
    if spec.scale != 1:
        parts.append(f"times {spec.scale:g}")
    factor = spec.capacity_factor
    parts.append(f"capacity factor {factor:g} in training" if factor else "no token is dropped")
    return ", ".join(parts)


def balance_text(spec: RouterSpec) -> str:
    """What keeps the load of the experts even."""
    if spec.choice == "expert":
        return "by construction"
    return "selection bias, moved each step" if spec.selection_bias else "auxiliary loss"


def parameters_text(count: float) -> str:
    """1,571.5 B, 12.9 B, 3.4 M."""
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f}"


def bytes_text(count: float) -> str:
    """In GiB, or MiB below one."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / 2**20:,.1f} MiB"
