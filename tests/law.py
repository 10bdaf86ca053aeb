"""The law that engines and layouts are held to: the same steps, taken by one process with textbook losses.

``check(recipe, world_size)`` compares losses, every gradient, the norm, routing, weights and moments with those of
``moe_zoo.certify``'s oracle.
"""

from itertools import chain

from moe_zoo.certify.certificate import judge, why
from moe_zoo.certify.oracle import textbook_steps
from moe_zoo.certify.problem import Problem
from moe_zoo.certify.ranks import steps_of_one_layout
from moe_zoo.spec.recipe import Recipe
from moe_zoo.testing import run_distributed

SEQ, STEPS, SEED = 12, 3, 3


def make_recipe(**changes) -> Recipe:
    model = {
        "vocab_size": 29,
        "d_model": 16,
        "num_layers": 2,
        "init_std": 0.3,
        "attention": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "qk_norm": True},
        "feed_forward": {"d_ff": 20, "activation": "silu", "gated": True},
        "moe": {
            "router": {"num_experts": 6, "top_k": 2, "jitter": 0.1},
            "experts": {"d_ff": 12, "activation": "gelu", "gated": True},
            "shared": {"d_ff": 8, "activation": "relu", "gated": False},
        },
    }
    values = {
        "name": "law",
        "model": model,
        "data": {"path": "none", "tokenizer": "none", "seq_len": SEQ},
        "train": {"steps": STEPS, "global_batch": 8, "micro_batches": 2, "seed": SEED},
        # eps: below it Adam would turn rounding noise into whole steps
        "optim": {"lr": 1e-2, "eps": 1e-5, "clip": 0.5, "schedule": "constant"},
        "balance": {"aux_coefficient": 0.3, "z_coefficient": 0.01, "scope": "micro_batch"},
        "log": {"wandb": "off"},
    }
    for path, value in changes.items():
        *folders, last = path.split("__")
        target = values
        for folder in folders:
            target = target.setdefault(folder, {})
        target[last] = value
    return Recipe.from_dict(values)


def check(recipe: Recipe, world_size: int, starved: bool = True, has_idle: bool = True) -> None:
    """Experts 4 and up get no token in the first step; ``starved`` says that the recipe cannot help it.

    Idle experts stay near each other, and a later step may leave a choice among them to rounding: without them,
    ``has_idle`` false, no choice is so close.
    """
    problem = Problem(recipe, num_idle=max(0, recipe.model.num_experts - 4) if has_idle else 0)
    truth = textbook_steps(problem)
    assert all(record["norm"][""] > recipe.optim.clip for record in truth), "clipping must be active"
    if starved:
        assert all(counts[4:].eq(0).all() for counts in truth[0]["counts"].values()), (
            "the last experts must get no token"
        )
    by_rank = run_distributed(steps_of_one_layout, problem, truth, world_size=world_size)
    result = judge("law", "", list(chain.from_iterable(by_rank)), {}, 0.0)
    assert result.status == "equal", why(result)
