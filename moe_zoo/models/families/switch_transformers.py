"""Switch: a T5 with experts, the weights of google/switch-*. Source: arXiv:2101.03961; transformers.models.switch_transformers.

transformers counts an expert's slots by a constant, ``expert_capacity`` per row, where the paper has a factor of what an
even split would give (eq. 3). A constant says the same as a factor at one length of a row; we take that of T5's training,
512 tokens (arXiv:1910.10683, section 3.1.2): ``capacity_factor = expert_capacity * num_experts / 512``. It holds in
training. In evaluation nothing is dropped, which is what the constant does to any row of up to ``expert_capacity`` tokens.
"""

import math
from typing import Any

from transformers import PretrainedConfig

from moe_zoo.models.families.base import Family, Rule, refused
from moe_zoo.spec.architecture import Architecture, EncoderSpec
from moe_zoo.spec.attention import RelativeAttentionSpec
from moe_zoo.spec.errors import CheckpointError
from moe_zoo.spec.feed_forward import FeedForwardSpec, MoESpec, RouterSpec

ROW_LEN = 512
ACTIVATIONS = ("relu", "gelu", "silu")


def read(config: PretrainedConfig) -> Architecture:
    if config.router_bias:
        raise refused(config, "router_bias", True, "router_bias false")
    if config.dense_act_fn not in ACTIVATIONS:
        raise refused(config, "dense_act_fn", config.dense_act_fn, f"one of {', '.join(ACTIVATIONS)}")
    halves = (config.num_layers, config.encoder_sparse_step), (config.num_decoder_layers, config.decoder_sparse_step)
    (encoder_first, encoder_every), (first, every) = (sparse_layers(*half) for half in halves)
    own = (
        {"first_layer": encoder_first, "every": encoder_every}
        if (encoder_first, encoder_every) != (first, every)
        else {}
    )
    ffn = FeedForwardSpec(d_ff=config.d_ff, activation=config.dense_act_fn, gated=False)
    router = RouterSpec(
        num_experts=config.num_experts,
        jitter=float(config.router_jitter_noise),
        capacity_factor=config.expert_capacity * config.num_experts / ROW_LEN,
    )
    return Architecture(
        vocab_size=config.vocab_size,
        d_model=config.d_model,
        num_layers=config.num_layers + config.num_decoder_layers,
        attention=RelativeAttentionSpec(
            num_heads=config.num_heads,
            head_dim=config.d_kv,
            buckets=config.relative_attention_num_buckets,
            max_distance=config.relative_attention_max_distance,
        ),
        feed_forward=ffn,
        moe=MoESpec(router=router, experts=ffn, first_layer=first, every=every)
        if encoder_first < config.num_layers or first < config.num_decoder_layers
        else None,
        norm_eps=config.layer_norm_epsilon,
        tie_embeddings=bool(config.tie_word_embeddings),
        encoder=EncoderSpec(num_layers=config.num_layers, **own),
    )


def sparse_layers(num_layers: int, step: int) -> tuple[int, int]:
    """(first, every) of a half: layers 1, 1 + step ..., all of them with a step of one.

    To ask transformers for no sparse layer gives a step of ``num_layers``, and so layer 1, all the same.
    """
    if step < 1:
        return num_layers, 1
    return (0, 1) if step == 1 else (1, step)


def write(architecture: Architecture) -> dict[str, Any]:
    spec, moe, ffn = architecture.attention, architecture.moe, architecture.feed_forward
    num_encoder = architecture.num_encoder_layers
    num_decoder = architecture.num_layers - num_encoder
    halves = {"encoder": range(num_encoder), "decoder": range(num_encoder, architecture.num_layers)}
    sparse = {half: sum(map(architecture.is_sparse, layers)) for half, layers in halves.items()}
    _check(architecture, sparse)
    factor = moe.router.capacity_factor if moe else None
    return {
        "vocab_size": architecture.vocab_size,
        "d_model": architecture.d_model,
        "d_kv": spec.head_dim,
        "d_ff": ffn.d_ff,
        "num_heads": spec.num_heads,
        "num_layers": num_encoder,
        "num_decoder_layers": num_decoder,
        "num_sparse_encoder_layers": sparse["encoder"],
        "num_sparse_decoder_layers": sparse["decoder"],
        "num_experts": architecture.num_experts,
        "expert_capacity": math.ceil(factor * ROW_LEN / architecture.num_experts - 1e-6) if factor else ROW_LEN,
        "router_jitter_noise": moe.router.jitter if moe else 0.0,
        "relative_attention_num_buckets": spec.buckets,
        "relative_attention_max_distance": spec.max_distance,
        "dense_act_fn": ffn.activation,
        "layer_norm_epsilon": architecture.norm_eps,
        "tie_word_embeddings": architecture.tie_embeddings,
    }


def _check(architecture: Architecture, sparse: dict[str, int]) -> None:
    """Refuse what this layout has no words for, before transformers builds another model from it."""
    moe, ffn, num_encoder = architecture.moe, architecture.feed_forward, architecture.num_encoder_layers
    if ffn.gated or moe is None or moe.experts != ffn or moe.shared is not None:
        raise _no_words("feed_forward", "experts that are not the dense layers' twins, ungated")
    if architecture.encoder.extra_ffn:
        raise _no_words("encoder.extra_ffn", "a feed-forward behind the experts")
    router = moe.router
    if (router.top_k, router.score, router.scale, router.selection_bias) != (1, "softmax", 1.0, False):
        raise _no_words("router", "any but the paper's: softmax, the best expert, its probability")
    halves = {"encoder": (0, num_encoder), "decoder": (num_encoder, architecture.num_layers - num_encoder)}
    for half, (start, length) in halves.items():
        first, every = sparse_layers(length, length // sparse[half] if sparse[half] else length)
        here = [layer for layer in range(length) if layer >= first and (layer - first) % every == 0]
        if here != [layer for layer in range(length) if architecture.is_sparse(start + layer)]:
            raise _no_words(f"{half}.every", "such a choice of sparse layers")


def _no_words(what: str, which: str) -> CheckpointError:
    return CheckpointError(
        f"save_pretrained: {what}; the layout of switch_transformers has no words for {which}; save the model as ours, "
        f"with config.upstream set to None"
    )


def rules(architecture: Architecture) -> tuple[Rule, ...]:
    """Halves have blocks of their own there, so a rule names the block of both sides."""
    ends = [
        Rule("shared.weight", "embed.weight"),
        Rule("encoder.final_layer_norm.weight", "encoder_norm.weight"),
        Rule("decoder.final_layer_norm.weight", "norm.weight"),
        *(
            Rule(f"{half}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", f"tables.{half}")
            for half in ("encoder", "decoder")
        ),
    ]
    if not architecture.tie_embeddings:
        ends.append(Rule("lm_head.weight", "head.weight"))
    num_encoder = architecture.num_encoder_layers
    for layer in range(architecture.num_layers):
        half, number = ("encoder", layer) if layer < num_encoder else ("decoder", layer - num_encoder)
        ends += _block_rules(f"{half}.block.{number}.layer.", f"layers.{layer}.", half == "decoder")
    return tuple(ends)


def _block_rules(theirs: str, ours: str, in_decoder: bool) -> list[Rule]:
    last = 2 if in_decoder else 1
    parts = [(0, "SelfAttention", "attention", "attention_norm")]
    parts += [(1, "EncDecAttention", "cross_attention", "cross_norm")] if in_decoder else []
    found = [Rule(f"{theirs}{last}.layer_norm.weight", f"{ours}feed_forward_norm.weight")]
    for number, attention, our_attention, norm in parts:
        found.append(Rule(f"{theirs}{number}.layer_norm.weight", f"{ours}{norm}.weight"))
        for short, long in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out")):
            found.append(Rule(f"{theirs}{number}.{attention}.{short}.weight", f"{ours}{our_attention}.{long}.weight"))
    mlp, ffn = f"{theirs}{last}.mlp.", f"{ours}feed_forward."
    return [
        *found,
        Rule(mlp + "wi.weight", ffn + "up.weight"),
        Rule(mlp + "wo.weight", ffn + "down.weight"),
        Rule(mlp + "router.classifier.weight", ffn + "router.weight"),
        Rule(mlp + "experts.expert_{expert}.wi.weight", ffn + "experts.w_up", is_transposed=True),
        Rule(mlp + "experts.expert_{expert}.wo.weight", ffn + "experts.w_down", is_transposed=True),
    ]


def aliases(architecture: Architecture) -> dict[str, str]:
    """Tensors that files hold again under another name: copy -> original. A T5 embeds both halves alike."""
    copies = {f"{half}.embed_tokens.weight": "shared.weight" for half in ("encoder", "decoder")}
    return copies | ({"lm_head.weight": "shared.weight"} if architecture.tie_embeddings else {})


FAMILY = Family("switch_transformers", read, write, (), rules, aliases)
