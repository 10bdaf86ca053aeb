"""Every product of degrees that fits, each with one draw of all other choices: the slow set's sweep.

pytest -m slow tests/distributed/test_layout_products.py
"""

import itertools
import random

import pytest

from moe_zoo.spec.errors import PlanError
from moe_zoo.spec.layout import resolve_layout
from moe_zoo.spec.recipe import Recipe
from tests.distributed.test_layout_law import split_recipe
from tests.law import check

DEGREES = {"pp": (1, 2), "tp": (1, 2, 4), "cp": (1, 2, 4), "replicate": (1, 2), "ep": (1, 2, 4), "etp": (1, 2)}
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
ROUTERS = [
    {"num_experts": 8, "top_k": 2, "jitter": 0.1},
    {"num_experts": 8, "top_k": 1, "capacity_factor": 1.0, "jitter": 0.01},
    {"num_experts": 8, "top_k": 2, "num_groups": 4, "groups_per_token": 2, "jitter": 0.1},
    {"num_experts": 8, "top_k": 2, "choice": "expert", "jitter": 0.1},
    {"num_experts": 8, "top_k": 2, "score": "sigmoid", "normalize": True, "selection_bias": True, "jitter": 0.1},
]


ENCODER_DECODER = {
    "model__attention": {"num_heads": 4, "head_dim": 4, "buckets": 8, "max_distance": 12},
    "data__seq_len": 24,
    "data__encoder_len": 16,
    "optim__clip": 0.1,  # a tied head divides its gradients by sqrt(d_model)
}


def drawn(degrees: dict[str, int], seed: int, has_encoder: bool = False) -> Recipe:
    """A recipe of these degrees, everything else drawn from ``seed``."""
    draw = random.Random(seed)
    engine = draw.choice(["deepspeed", "fsdp"])
    router = draw.choice([r for r in ROUTERS if "choice" not in r] if has_encoder else ROUTERS)
    zero = draw.choice([2, 3] if engine == "fsdp" else [0, 1, 2, 3])
    parallel = degrees | {
        "engine": engine,
        "zero_stage": zero,
        "schedule": draw.choice(SCHEDULES),
        "context": draw.choice(["gather", "ulysses"]),
        "recompute": draw.choice([0, 0, 1, 2, "selective"]),
        "gather": draw.choice(["layer", "step"]),
        "reduce": draw.choice(["step", "micro_batch"]) if zero == 3 else "step",
        "dispatch": draw.choice(["exact", "padded"]) if {"capacity_factor", "choice"} & router.keys() else "exact",
    }
    balance = {"aux_coefficient": 0.3, "z_coefficient": 0.01}
    balance["scope"] = draw.choice(["sequence", "micro_batch", "global_batch"])
    if "selection_bias" in router:
        balance = {"method": "bias", "bias_update_rate": 0.05, "z_coefficient": 0.01}
    if "choice" in router:
        balance = {"method": "none", "z_coefficient": 0.01}
    layers = 4 if degrees["pp"] > 1 else 2
    encoder = {"num_layers": layers // 2, "extra_ffn": draw.choice([False, True])}
    return split_recipe(
        engine,
        **(ENCODER_DECODER | {"model__encoder": encoder} if has_encoder else {}),
        parallel=parallel,
        balance=balance,
        model__moe__router=router,
        model__moe__first_layer=draw.choice([0, layers // 4 if has_encoder else 1]),
        model__tie_embeddings=draw.choice([False, True]),
        model__num_layers=layers,
        train={"steps": 3, "global_batch": 8, "micro_batches": 4 if degrees["pp"] > 1 else 2},
    )


def layouts(world: int, has_encoder: bool) -> list[dict[str, int]]:
    """All degrees that some recipe can have on ``world`` ranks, as the planner's rules say."""
    found = []
    for values in itertools.product(*DEGREES.values()):
        degrees = dict(zip(DEGREES, values, strict=True))
        try:
            resolve_layout(drawn(degrees, 0, has_encoder), world, world)
            found.append(degrees)
        except PlanError:
            continue
    return found


def cases(world: int, limit: int | None = None, has_encoder: bool = False) -> list[pytest.param]:
    fitting = layouts(world, has_encoder)
    if limit is not None:
        fitting = random.Random(world).sample(fitting, min(limit, len(fitting)))
    return [
        pytest.param(
            *(world, degrees, seed, has_encoder),
            id=" ".join([f"{world}{' encoder' * has_encoder}:", *(f"{k}{v}" for k, v in degrees.items() if v > 1)]),
        )
        for seed, degrees in enumerate(fitting)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "degrees", "seed", "has_encoder"),
    [*cases(2), *cases(4), *cases(8, limit=40), *cases(2, has_encoder=True), *cases(4, has_encoder=True)],
)
def test_a_product_of_degrees(world, degrees, seed, has_encoder):
    recipe = drawn(degrees, seed, has_encoder)
    try:
        resolve_layout(recipe, world, world)
    except PlanError as refused:
        pytest.skip(str(refused))  # ulysses or a schedule that seed 0 did not draw
    check(recipe, world_size=world, starved=False, has_idle=False)
