"""The learning rate at its ends and between, computed by hand."""

from itertools import pairwise

import pytest

from moe_zoo.spec.recipe import Optim
from moe_zoo.train.schedule import learning_rate

NUM_STEPS = 100


def rates(**changes) -> list[float]:
    spec = Optim(lr=0.8, warmup_steps=10, min_lr_ratio=0.25, **changes)
    return [learning_rate(spec, step, NUM_STEPS) for step in range(NUM_STEPS)]


SHAPES = [{"schedule": "constant"}, {"schedule": "cosine"}, {"schedule": "wsd", "decay_steps": 20}]


@pytest.mark.parametrize("shape", SHAPES)
def test_warmup_is_linear_takes_a_first_step_and_meets_the_schedule(shape):
    found = rates(**shape)
    assert found[:10] == pytest.approx([0.08 * step for step in range(1, 11)])
    assert found[10] == pytest.approx(0.8)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_step_jumps_and_none_leaves_the_range(shape):
    found = rates(**shape)
    assert max(abs(after - before) for before, after in pairwise(found)) <= 0.08 + 1e-12
    assert min(found[10:]) >= 0.2 and max(found) <= 0.8


def test_constant_stays():
    assert set(rates(schedule="constant")[10:]) == {0.8}


def test_cosine_is_half_way_down_in_the_middle_and_almost_down_at_the_last_step():
    found = rates(schedule="cosine")
    assert found[55] == pytest.approx((0.8 + 0.2) / 2)
    assert found[99] == pytest.approx(0.2, abs=0.6 * 3.2e-4)  # 1 of 90 steps before the end: (1 - cos(pi/90)) / 2
    assert all(after < before for before, after in pairwise(found[10:]))


def test_wsd_is_flat_then_falls_by_equal_parts():
    found = rates(schedule="wsd", decay_steps=20)
    assert set(found[10:81]) == {0.8}
    assert found[81:] == pytest.approx([0.8 - 0.6 * step / 20 for step in range(1, 20)])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_rate_after_the_last_step_is_the_least(shape):
    spec = Optim(lr=0.8, min_lr_ratio=0.25, **shape)
    assert learning_rate(spec, NUM_STEPS, NUM_STEPS) == pytest.approx(0.8 if shape == SHAPES[0] else 0.2)


def test_without_warmup_the_first_step_has_the_full_rate():
    assert all(learning_rate(Optim(lr=0.5, **shape), 0, NUM_STEPS) == 0.5 for shape in SHAPES)


def test_a_decay_over_all_steps_and_one_step_in_all_divide_by_nothing():
    assert learning_rate(Optim(lr=1.0, schedule="cosine"), 0, 1) == 1.0
    assert learning_rate(Optim(lr=1.0, schedule="wsd", decay_steps=1), 0, 1) == 1.0


@pytest.mark.parametrize("shape", SHAPES)
def test_the_rate_is_a_pure_function_of_the_step(shape):
    spec = Optim(lr=0.8, warmup_steps=10, min_lr_ratio=0.25, **shape)
    backwards = [learning_rate(spec, step, NUM_STEPS) for step in reversed(range(NUM_STEPS))]
    assert backwards[::-1] == rates(**shape)
