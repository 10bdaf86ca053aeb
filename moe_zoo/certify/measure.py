"""How far a rank's numbers are from the truth: the worst error of each quantity, and where it stands."""

import math
from typing import NamedTuple

from torch import Tensor

from moe_zoo.certify.oracle import Record

# Quantities in the order of cause and effect: the first group that breaks says where the fault lies.
PHASES = (
    ("order",),
    ("restored",),
    ("counts", "dropped", "entropy", "balance", "z", "loss"),
    ("gradient",),
    ("norm",),
    ("bias", "weight", "exp_avg", "exp_avg_sq"),
)
PHASE_OF = {quantity: index for index, phase in enumerate(PHASES) for quantity in phase}
SMALL = 1e-2  # of the step's largest value: below it a parameter's errors are not measured by its own size


class Deviation(NamedTuple):
    """An error relative to the size of what was to come out, and where it was largest."""

    quantity: str
    name: str  # the parameter, the layer; nothing for a loss
    step: int  # from 1
    error: float


def sizes(values: dict[str, Tensor]) -> dict[str, float]:
    """What the error of each value is divided by."""
    own = {name: float(value.abs().max()) for name, value in values.items()}
    largest = max(own.values(), default=0.0)
    return {name: max(size, SMALL * largest) or 1.0 for name, size in own.items()}


def error_of(actual: Tensor, expected: Tensor, size: float) -> float:
    """Largest difference over ``size``; what is not a number is infinitely wrong."""
    if not actual.numel():
        return 0.0
    error = float((actual.double() - expected.double()).abs().max()) / size
    return math.inf if math.isnan(error) else error


def worst(deviations: list[Deviation]) -> list[Deviation]:
    """The largest of each quantity and step."""
    found: dict[tuple[str, int], Deviation] = {}
    for deviation in deviations:
        key = (deviation.quantity, deviation.step)
        if key not in found or deviation.error > found[key].error:
            found[key] = deviation
    return list(found.values())


def compare_whole(actual: Record, expected: Record, step: int) -> list[Deviation]:
    """Records of whole values, such as those of two oracles."""
    return [
        Deviation(quantity, name, step, error_of(actual[quantity][name], value, sizes(values)[name]))
        for quantity, values in expected.items()
        if quantity in PHASE_OF
        for name, value in values.items()
    ]
