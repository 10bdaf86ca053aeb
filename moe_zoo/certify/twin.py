"""The tiny twin of a recipe: every choice it makes, at sizes that a laptop steps through in a second.

What stands in ``TINY`` is size; whatever else the architecture says (router score, top-k, capacity, jitter, bias, shared
expert, norms, attention, ties) the twin says too.
"""

import math
from typing import Any

from moe_zoo.certify.problem import num_pairs
from moe_zoo.spec.attention import AttentionSpec, LatentAttentionSpec, RelativeAttentionSpec
from moe_zoo.spec.engine import engine_name
from moe_zoo.spec.feed_forward import RouterSpec
from moe_zoo.spec.recipe import Recipe

Changes = dict[str, Any]  # by dotted key

LAYERS = 4  # two pipeline ranks with two stages each; with a stride of two, two sparse layers
TINY: Changes = {
    "model.vocab_size": 32,
    "model.d_model": 16,
    "model.num_layers": LAYERS,
    "model.encoder.num_layers": LAYERS // 2,
    "model.init_std": 0.3,  # so that no gradient is lost in rounding
    "model.feed_forward.d_ff": 24,
    "model.moe.experts.d_ff": 16,
    "model.moe.shared.d_ff": 8,
}
HEADS = 4
SCALES = {"residual_scale": 0.7, "logit_divisor": 1.5}  # where there are any: no gradient is lost in rounding either
ZERO_EXPERTS = 4  # where there are any
LIMIT = 0.5  # where there is one: it cuts something off
SEQ_LEN, ENCODER_LEN = 16, 8  # the second where there is an encoder: half of the blocks, half of the row
ROWS_PER_RANK = 4
STEPS = 3
AUX, Z, BIAS_RATE = 0.3, 0.01, 0.05  # where the recipe has one at all: large enough to be seen in a gradient
CLIP = 0.5  # below every norm of the twin, so that clipping is always active
ADAM_EPS = 1e-4  # below it Adam turns rounding of tiny gradients into whole steps


def tiny_twin(recipe: Recipe, ranks: int) -> Recipe:
    """The twin on plain data parallelism; factors change one thing of it each."""
    values = recipe.to_dict()
    values |= {
        "name": f"{recipe.name}-twin",
        "init": None,
        "data": {"path": "none", "tokenizer": "none", "seq_len": SEQ_LEN}
        | ({"encoder_len": ENCODER_LEN} if recipe.model.encoder else {}),
        "train": {"steps": STEPS, "global_batch": ROWS_PER_RANK * ranks},
        "optim": {"lr": 1e-2, "eps": ADAM_EPS, "clip": CLIP, "schedule": "constant"}
        | {key: values["optim"][key] for key in ("betas", "weight_decay")},
        "parallel": {"engine": engine_name(recipe), "ep": 1}
        | {key: values["parallel"][key] for key in ("zero_stage", "schedule", "context")},
        "balance": _visible(values["balance"]),
        "checkpoint": {},
        "log": {"wandb": "off"},
        "precision": {},
        "cluster": None,
        "expect": None,
    }
    return Recipe.from_dict(put_over(values, _sizes(recipe, ranks)))


def changed(recipe: Recipe, changes: Changes) -> Recipe:
    """``recipe`` with other values at some dotted keys."""
    return Recipe.from_dict(put_over(recipe.to_dict(), changes))


def put_over(values: dict[str, Any], changes: Changes) -> dict[str, Any]:
    """Nested ``values`` with other leaves. What has no such group (a dense model's experts) is left alone."""
    for key, value in changes.items():
        *groups, last = key.split(".")
        target: Any = values
        for group in groups:
            target = target.get(group) if target else None
        if target is not None:
            target[last] = value
    return values


def what_was_shrunk(recipe: Recipe, twin: Recipe) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (recipe's value, twin's) where they differ in the model, the batch or the balance."""
    before, after = (_flat(r.to_dict()) for r in (recipe, twin))
    told = ("model.", "train.steps", "train.global_batch", "data.seq_len", "optim.", "balance.", "precision.")
    return {key: (before[key], after[key]) for key in before if key.startswith(told) and before[key] != after.get(key)}


def _sizes(recipe: Recipe, ranks: int) -> Changes:
    moe, sizes = recipe.model.moe, dict(TINY)
    for key, spec in recipe.model.attentions.items():
        sizes |= {f"model.{key}.{name}": value for name, value in _attention_sizes(spec).items()}
    if recipe.model.local_attention:
        sizes["model.local_layers"] = [i for i in recipe.model.local_layers if i < LAYERS] or [LAYERS - 1]
    sizes |= {f"model.{key}": value for key, value in SCALES.items() if getattr(recipe.model, key) != 1.0}
    if moe is None:
        return sizes
    sparse = {"first_layer": min(moe.first_layer, 1), "every": min(moe.every, 2)}
    sparse["router.num_experts"] = _num_experts(moe.router, ranks)
    sparse["router.zero_experts"] = min(moe.router.zero_experts, ZERO_EXPERTS)
    if moe.experts.limit is not None:
        sparse["experts.limit"] = LIMIT
    encoder = recipe.model.encoder
    for key, most in (("first_layer", 1), ("every", 2)):
        if encoder is not None and (value := getattr(encoder, key)) is not None:
            sizes[f"model.encoder.{key}"] = min(value, most)
    return sizes | {f"model.moe.{key}": value for key, value in sparse.items()}


def _attention_sizes(spec: AttentionSpec | LatentAttentionSpec | RelativeAttentionSpec) -> dict[str, int]:
    if isinstance(spec, RelativeAttentionSpec):
        return {"num_heads": HEADS, "head_dim": 8, "buckets": 8, "max_distance": 6}
    if isinstance(spec, LatentAttentionSpec):
        sizes = {"num_heads": HEADS, "kv_rank": 6, "nope_dim": 4, "rope_dim": 4, "value_dim": 6}
        return sizes | ({"query_rank": 7} if spec.query_rank else {})
    sizes = {"num_heads": HEADS, "num_kv_heads": max(1, HEADS * spec.num_kv_heads // spec.num_heads), "head_dim": 8}
    part = {"window": 5, "chunk": 5, "value_dim": 6, "rotary_dim": 4, "temperature_floor": 4}
    return sizes | {key: min(value, getattr(spec, key)) for key, value in part.items() if getattr(spec, key)}


def _num_experts(router: RouterSpec, ranks: int) -> int:
    """Enough for an idle one beside those that are chosen, for every rank, and for every group."""
    multiple = math.lcm(ranks, router.num_groups)
    within_reach = math.ceil(router.top_k * router.num_groups / router.groups_per_token)
    # Of two opposite experts the sigmoids sum to one: groups of two would all be worth the same.
    told_apart = 4 * router.num_groups if router.num_groups > 1 and router.group_score == "top2" else 0
    return multiple * math.ceil(max(8, 2 * num_pairs(router.top_k) + 1, within_reach, told_apart) / multiple)


def _visible(balance: dict[str, Any]) -> dict[str, Any]:
    least = {"aux_coefficient": AUX, "z_coefficient": Z, "bias_update_rate": BIAS_RATE}
    return balance | {key: max(balance[key], value) for key, value in least.items() if balance[key]}


def _flat(values: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {path: values}
    return {
        key: leaf
        for name, value in values.items()
        for key, leaf in _flat(value, f"{path}.{name}" if path else name).items()
    }
