"""Bytes that a rank sends per optimizer step, by axis and collective, in closed form.

A collective over n ranks moves (n - 1) / n of its larger side per rank in a ring, an all-reduce twice that. Routing is
taken as even and nothing as dropped. Norms, losses and counts of a few hundred bytes are left out. Under a pipeline the
number of times that ZeRO-3 gathers a weight depends on what its schedule still holds: the formula says at most.

``benchmarks/traffic.py`` measures the same and prints both. Letters: D model width, B rows, S positions.
"""

from collections import Counter
from collections.abc import Iterator

from moe_zoo.spec.accounting import ffn_biases, ffn_matrices, latent_matrices, latent_vectors, position_tables
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.attention import AttentionSpec, LatentAttentionSpec, RelativeAttentionSpec
from moe_zoo.spec.feed_forward import FeedForwardSpec
from moe_zoo.spec.layout import ParallelLayout
from moe_zoo.spec.recipe import Recipe, row_parts
from moe_zoo.spec.stages import cut_stages

Traffic = Counter[tuple[str, str]]  # (axis, or replicas of a kind, collective) -> bytes sent by a rank
ITEM_BYTES = {"fp32": 4, "bf16": 2}


def step_traffic(recipe: Recipe, layout: ParallelLayout, engine: str, pp_rank: int = 0) -> Traffic:
    """What a rank of pipeline rank ``pp_rank`` sends in one optimizer step under ``engine``."""
    cuts = cut_stages(recipe.model, layout.num_stages, recipe.data.seq_len, recipe.data.encoder_len or 0)
    blocks = [layer for stage in layout.stages_of(pp_rank) for layer in cuts[stage]]
    total = _weights(recipe, layout, engine, blocks)
    for _ in range(recipe.train.micro_batches):
        total += _activations(recipe, layout, blocks)
        total += _between_stages(recipe, layout, pp_rank)
    return total


# ---------------------------------------------------------------------- weights and their gradients


def slice_sizes(architecture: Architecture, layout: ParallelLayout, layer: int) -> Counter[str]:
    """Elements of block ``layer`` on one rank, by the kind of their replica group."""
    D, spec, moe = architecture.d_model, architecture.attention_of(layer), architecture.moe
    norm = D if architecture.norm == "rmsnorm" else 2 * D
    reads, extra = reads_encoder(architecture, layer), architecture.has_extra_ffn(layer)
    own = architecture.attentions_per_block
    sizes = Counter({"stage": (2 * own + reads + extra) * norm})
    for _ in range(own + reads):
        sizes += _attention_sizes(spec, D, layout)
    dense = extra + (own if architecture.shortcut or not architecture.is_sparse(layer) else 0)
    sizes["tp"] += dense * (_ffn(architecture.feed_forward, D) // layout.tp)
    if moe is None or not architecture.is_sparse(layer):
        return sizes
    sizes["stage"] += moe.router.num_scored * (D + moe.router.bias)
    sizes["ep"] += moe.router.num_experts * _ffn(moe.experts, D) // (layout.ep * layout.etp)
    sizes["tp"] += _ffn(moe.shared, D) // layout.tp if moe.shared else 0
    sizes["stage"] += D * moe.shared_gate
    return sizes


def reads_encoder(architecture: Architecture, layer: int) -> bool:
    """Whether block ``layer`` is of a decoder that attends to an encoder."""
    return architecture.encoder is not None and layer >= architecture.num_encoder_layers


def _attention_sizes(
    spec: AttentionSpec | LatentAttentionSpec | RelativeAttentionSpec, D: int, layout: ParallelLayout
) -> Counter[str]:
    if isinstance(spec, RelativeAttentionSpec):
        return Counter({"tp": 4 * D * spec.num_heads * spec.head_dim // layout.tp})
    if isinstance(spec, LatentAttentionSpec):
        shared, heads = latent_matrices(D, spec)
        return Counter({"stage": shared + latent_vectors(spec), "tp": (heads + spec.bias * D) // layout.tp})
    norms_all = spec.qk_norm and spec.qk_norm_over == "all"
    kv_parts = min(layout.tp, spec.num_kv_heads)
    heads, key_heads = spec.num_heads // layout.tp, spec.num_kv_heads // kv_parts
    q, v = spec.head_dim, spec.value_width
    sizes = Counter({"stage": 2 * q if spec.qk_norm and not norms_all else 0})
    sizes["tp"] += heads * ((D + spec.bias + norms_all) * q + D * v + spec.sinks) + spec.out_bias * D // layout.tp
    sizes["tp" if kv_parts == layout.tp else "kv"] += key_heads * ((D + spec.bias) * (q + v) + norms_all * q)
    return sizes


def replicas(layout: ParallelLayout) -> dict[str, int]:
    """Ranks of a pod that hold the same slice, by kind."""
    pod = layout.pod_size
    return {"stage": pod, "tp": pod // layout.tp, "kv": pod // layout.kv_parts, "ep": pod // (layout.ep * layout.etp)}


def _weights(recipe: Recipe, layout: ParallelLayout, engine: str, blocks: list[int]) -> Traffic:
    inner: Counter[str] = Counter()
    for layer in blocks:
        inner += slice_sizes(recipe.model, layout, layer)
    ends = _end_sizes(recipe.model, layout, blocks)
    gathers = _gathers(recipe, engine)
    wire, wide = ITEM_BYTES[recipe.precision.compute], ITEM_BYTES[recipe.precision.reduce]
    total: Traffic = Counter()
    for kind, ranks in replicas(layout).items():
        share = (ranks - 1) / ranks
        held = inner[kind] + ends[kind]
        axis = f"replicas {kind}"
        total[axis, "all_gather"] += share * wire * (gathers[0] * inner[kind] + gathers[1] * ends[kind])
        if engine == "deepspeed" and recipe.parallel.zero_stage < 3:
            total[axis, "all_reduce"] += 2 * share * wide * held
        else:
            times = recipe.train.micro_batches if recipe.parallel.reduce == "micro_batch" else 1
            total[axis, "reduce_scatter"] += share * wide * held * times
        pods = layout.replicate
        is_whole = engine == "deepspeed" and recipe.parallel.zero_stage == 0
        total["pods", "all_reduce"] += 2 * (pods - 1) / pods * 4 * held / (1 if is_whole else ranks)
    return +total


def _end_sizes(architecture: Architecture, layout: ParallelLayout, blocks: list[int]) -> Counter[str]:
    """Elements of embedding, last norm and head, where these blocks are the first or the last."""
    vocabulary = architecture.vocab_size * architecture.d_model // layout.tp
    is_last = architecture.num_layers - 1 in blocks
    tied = architecture.tie_embeddings and layout.pp == 1
    norm = architecture.d_model if architecture.norm == "rmsnorm" else 2 * architecture.d_model
    bias = architecture.head_bias * architecture.vocab_size // layout.tp * is_last
    first = vocabulary + position_tables(architecture) // layout.tp
    ends = first * (0 in blocks) + vocabulary * (is_last and not tied)
    ends_encoder = architecture.num_encoder_layers - 1 in blocks
    return Counter({"tp": ends + bias, "stage": norm * (is_last + ends_encoder)})


def _gathers(recipe: Recipe, engine: str) -> tuple[int, int]:
    """How often a step gathers (a block's weights, those of the ends)."""
    parallel, passes = recipe.parallel, recipe.train.micro_batches
    if parallel.zero_stage == 0:
        return 0, 0
    if engine == "deepspeed":
        times = 2 * passes if parallel.zero_stage == 3 and parallel.gather == "layer" else 1
        return times, times
    if parallel.pp > 1:
        return 1, 1
    frees = parallel.zero_stage == 3 and parallel.gather == "layer"
    return (2 if frees else 1) * passes, passes  # FSDP frees its weights after each backward, the root's never before


# ---------------------------------------------------------------------- activations of one micro-batch


def _activations(recipe: Recipe, layout: ParallelLayout, blocks: list[int]) -> Traffic:
    total: Traffic = Counter()
    for layer in blocks:
        again = _is_recomputed(recipe, layer)
        for key, sent, repeats in _block_moves(recipe, layout, layer):
            forward, backward = sent
            total[key[0], forward] += key[1] * (2 if again and repeats else 1)
            total[key[0], backward] += key[1]
    (*others, tokens), share = _tokens(recipe, layout), (layout.tp - 1) / layout.tp
    width = recipe.model.d_model * ITEM_BYTES[recipe.precision.compute]
    vector = tokens * width
    if 0 in blocks:  # the embedding's look-up is summed and split; its gradient comes together again
        total["tp", "reduce_scatter"] += share * (vector + sum(others) * width)
        total["tp", "all_gather"] += share * (vector + sum(others) * width)
    if recipe.model.num_layers - 1 in blocks:  # the head, and two fp32 sums per token of the loss
        total["tp", "all_gather"] += share * (vector + 8 * tokens)
        total["tp", "reduce_scatter"] += share * (vector + 8 * tokens)
        total["tp", "all_reduce"] += 2 * share * 4 * tokens
    return +total


def _block_moves(
    recipe: Recipe, layout: ParallelLayout, layer: int
) -> Iterator[tuple[tuple[str, float], tuple[str, str], bool]]:
    """((axis, bytes), (collective forward, its adjoint), whether recompute of the block repeats it)."""
    model = recipe.model
    item, parts = ITEM_BYTES[recipe.precision.compute], _tokens(recipe, layout)
    tokens, tp = parts[0] if layer < model.num_encoder_layers else parts[-1], layout.tp
    is_sparse = model.is_sparse(layer)
    vector = (tp - 1) / tp * tokens * model.d_model * item
    for _ in range(model.attentions_per_block):
        yield from _attention_moves(recipe, layout, layer, tokens, tokens)
    if reads_encoder(model, layer):
        yield ("tp", (tp - 1) / tp * parts[0] * model.d_model * item), ("all_gather", "reduce_scatter"), True
        yield from _attention_moves(recipe, layout, layer, tokens, parts[0])
    dense = model.attentions_per_block if model.shortcut or not is_sparse else 0
    dense += bool(is_sparse and model.moe and model.moe.shared) + model.has_extra_ffn(layer)
    for behind in reversed(range(dense)):
        yield ("tp", vector), ("all_gather", "reduce_scatter"), True
        # torch stops a second forward when it has what backward asks for: before the last sum of a block
        yield ("tp", vector), ("reduce_scatter", "all_gather"), behind > 0
    if is_sparse and model.moe:
        ranks, router = layout.ep * layout.etp, model.moe.router
        visits = router.top_k * router.num_experts / router.num_scored  # experts without weights are at home
        rows = 2 * tokens // tp * visits * layout.etp  # there and back
        yield ("ep", (ranks - 1) / ranks * rows * model.d_model * item), ("all_to_all", "all_to_all"), True


def _attention_moves(
    recipe: Recipe, layout: ParallelLayout, layer: int, queries: int, keys: int
) -> Iterator[tuple[tuple[str, float], tuple[str, str], bool]]:
    """Of ``queries`` tokens that attend to ``keys`` tokens; what is gathered for the latter alone is not counted."""
    item, spec, tp, cp = ITEM_BYTES[recipe.precision.compute], recipe.model.attention_of(layer), layout.tp, layout.cp
    vector = (tp - 1) / tp * queries * recipe.model.d_model * item
    yield ("tp", vector), ("all_gather", "reduce_scatter"), True
    yield ("tp", vector), ("reduce_scatter", "all_gather"), True
    key_heads, width = max(spec.num_kv_heads // tp, 1), (spec.head_dim + spec.value_width) * item
    if recipe.parallel.context == "gather":
        yield ("cp", (cp - 1) / cp * keys * cp * key_heads * width), ("all_gather", "reduce_scatter"), True
    else:
        entries = queries * (spec.num_heads // tp) + keys * max(key_heads, cp)
        yield ("cp", (cp - 1) / cp * entries * width), ("all_to_all", "all_to_all"), True


def _is_recomputed(recipe: Recipe, layer: int) -> bool:
    every = recipe.parallel.recompute
    return isinstance(every, int) and every > 0 and layer % every == 0


def _between_stages(recipe: Recipe, layout: ParallelLayout, pp_rank: int) -> Traffic:
    """Hidden states forward and their gradients back, over boundaries between stages of different ranks."""
    owner = {stage: rank for rank in range(layout.pp) for stage in layout.stages_of(rank)}
    sends = 0
    for stage in layout.stages_of(pp_rank):
        sends += stage + 1 < layout.num_stages and owner[stage + 1] != pp_rank
        sends += stage > 0 and owner[stage - 1] != pp_rank
    entries = sum(_tokens(recipe, layout)) * recipe.model.d_model + position_tables(recipe.model)
    return Counter({("pp", "send"): sends * entries // layout.tp * ITEM_BYTES[recipe.precision.compute]})


def _tokens(recipe: Recipe, layout: ParallelLayout) -> tuple[int, ...]:
    """Tokens of a micro-batch that a rank and its tp peers have; of an encoder-decoder in each half."""
    rows = recipe.train.global_batch // recipe.train.micro_batches // layout.dp
    return tuple(rows * length // layout.cp for length in row_parts(recipe.data))


def _ffn(spec: FeedForwardSpec, d_model: int) -> int:
    return ffn_matrices(spec, d_model) + sum(ffn_biases(spec, d_model))
