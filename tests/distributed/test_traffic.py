"""What a step moves is what arithmetic says, per collective and axis."""

from collections import Counter

import pytest

from benchmarks.traffic import moved
from moe_zoo.testing import run_distributed
from tests.distributed.test_encoder_decoder_law import encdec_recipe
from tests.distributed.test_layout_law import split_recipe

SMALL = 1000  # bytes: norms, losses, counts


LAYOUTS = [
    ({"engine": "deepspeed"}, 2),
    ({"engine": "deepspeed", "zero_stage": 1}, 2),
    ({"engine": "deepspeed", "zero_stage": 2}, 2),
    ({"engine": "deepspeed", "zero_stage": 0}, 2),
    ({"engine": "deepspeed", "gather": "step", "ep": 1}, 2),
    ({"engine": "deepspeed", "reduce": "micro_batch", "ep": 1}, 2),
    ({"engine": "fsdp"}, 2),
    ({"engine": "fsdp", "zero_stage": 2, "ep": 1}, 2),
    ({"engine": "deepspeed", "tp": 2, "ep": 2}, 2),
    ({"engine": "fsdp", "tp": 2, "ep": 1, "recompute": 1}, 2),
    ({"engine": "deepspeed", "cp": 2, "ep": 1}, 2),
    ({"engine": "fsdp", "cp": 2, "ep": 2, "context": "ulysses"}, 2),
    ({"engine": "fsdp", "replicate": 2, "ep": 1}, 2),
    ({"engine": "deepspeed", "replicate": 2, "tp": 2, "ep": 2}, 4),
    ({"engine": "fsdp", "pp": 2, "tp": 2, "ep": 1, "schedule": "DualPipeV"}, 4),
    ({"engine": "deepspeed", "pp": 2, "gather": "step", "ep": 2}, 4),
]
SHORTCUT = {"model__shortcut": True, "model__moe": {"router": {"num_experts": 6, "top_k": 3}, "experts": {"d_ff": 12}}}
SHORTCUT["model__attention"] = {"num_heads": 4, "kv_rank": 5, "nope_dim": 3, "rope_dim": 4, "value_dim": 6}
SHORTCUTS = [
    ({"engine": "fsdp", "tp": 2, "ep": 2, "recompute": 1}, 2),
    ({"engine": "deepspeed", "cp": 2, "ep": 2}, 2),
]


@pytest.mark.parametrize(("parallel", "world"), LAYOUTS, ids=lambda value: str(value))
def test_bytes_by_collective(parallel, world):
    changes = {"model__num_layers": 4, "train__micro_batches": 4} if "pp" in parallel else {}
    compare(split_recipe("fsdp", **{f"parallel__{key}": value for key, value in parallel.items()}, **changes), world)


ENCODER_DECODERS = [
    ({"engine": "deepspeed", "tp": 2, "ep": 2}, 2),
    ({"engine": "fsdp", "tp": 2, "ep": 1, "recompute": 1}, 2),
    ({"engine": "deepspeed", "cp": 2, "ep": 1}, 2),
    ({"engine": "fsdp", "cp": 2, "ep": 2, "context": "ulysses"}, 2),
    ({"engine": "fsdp", "pp": 2, "tp": 2, "ep": 1, "schedule": "DualPipeV"}, 4),
]


@pytest.mark.parametrize(("parallel", "world"), ENCODER_DECODERS, ids=lambda value: str(value))
def test_bytes_of_an_encoder_decoder(parallel, world):
    changes = {f"parallel__{key}": value for key, value in parallel.items()}
    changes |= {"train__micro_batches": 4} if "pp" in parallel else {}
    changes["model__moe__router"] = {"num_experts": 6}  # a capacity would ask for the choices of whole rows as well
    changes |= {"model__encoder": {"num_layers": 2, "extra_ffn": True}, "model__tie_embeddings": False}
    compare(encdec_recipe("fsdp", **changes), world)


@pytest.mark.parametrize(("parallel", "world"), SHORTCUTS, ids=lambda value: str(value))
def test_bytes_of_blocks_with_a_shortcut(parallel, world):
    changes = {f"parallel__{key}": value for key, value in parallel.items()}
    compare(split_recipe("fsdp", **changes | SHORTCUT), world)


def compare(recipe, world: int) -> None:
    pairs = run_distributed(moved, recipe, world_size=world)
    found, expected = (sum(counts, Counter()) for counts in zip(*pairs, strict=True))
    for key in found | expected:
        tolerance = SMALL * world + 0.25 * expected[key] * (key[1] == "all_to_all")  # routing is not even
        assert abs(found[key] - expected[key]) <= tolerance, (key, found[key], expected[key])
