"""Which ranks are near each other, and which axes of a layout stay among them."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from moe_zoo.spec.errors import RecipeError
from moe_zoo.spec.layout import ParallelLayout
from moe_zoo.spec.recipe import Count, Recipe, Section, Text
from moe_zoo.spec.validation import validate
from moe_zoo.spec.yaml_text import parse_yaml


class Cluster(Section):
    """What a site says of its machines. Without a file the launcher's ranks per node are the domain."""

    name: Text
    ranks_per_domain: Count  # joined by the fast link: the GPUs of a node, or 72 of an NVL72


def read_cluster(path: str | Path) -> Cluster:
    """A cluster file. Raises ``RecipeError``, one line."""
    try:
        values = parse_yaml(Path(path).read_text(encoding="utf-8"))
        if not isinstance(values, Mapping):
            raise RecipeError("must hold keys and values")
        return validate(Cluster, values)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecipeError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"cluster: {path}; {reason}; give a YAML file with name and ranks_per_domain") from None


def ranks_per_domain(recipe: Recipe, ranks_per_node: int) -> int:
    """How many consecutive ranks the fast link joins: what the recipe's cluster file says, else those of a node."""
    return read_cluster(recipe.cluster).ranks_per_domain if recipe.cluster else ranks_per_node


def domains_crossed(layout: ParallelLayout, ranks_per_domain: int) -> dict[str, int]:
    """For each axis of more than one rank: in how many domains the ranks of its most scattered group are."""
    return {
        axis: max(len({rank // ranks_per_domain for rank in ranks}) for ranks in groups)
        for axis, groups in ((axis, list(_groups(layout, axis))) for axis in ("tp", "cp", "ep", "dp", "pods", "pp"))
        if len(groups[0]) > 1
    }


def describe(layout: ParallelLayout, ranks_per_domain: int) -> str:
    """``4 nodes of 8 ranks: tp, ep inside; dp across 4``; a line for the log of a run."""
    crossed = domains_crossed(layout, ranks_per_domain)
    inside = ", ".join(axis for axis, domains in crossed.items() if domains == 1)
    across = ", ".join(f"{axis} across {domains}" for axis, domains in crossed.items() if domains > 1)
    nodes = -(-layout.world // ranks_per_domain)
    where = f"{nodes} node{'s' * (nodes > 1)} of {min(ranks_per_domain, layout.world)}"
    return f"{where}: " + "; ".join(part for part in (inside and f"{inside} inside", across) if part)


def _groups(layout: ParallelLayout, axis: str) -> Iterator[range]:
    """Ranks that work together on an axis: ``size`` of them, ``stride`` apart, the same in every block."""
    row = layout.cp * layout.tp
    size, stride = {
        "tp": (layout.tp, 1),
        "cp": (layout.cp, layout.tp),
        "ep": (layout.ep * layout.etp, 1),
        "dp": (layout.pod_size // row, row),
        "pods": (layout.replicate, layout.pod_size),
        "pp": (layout.pp, layout.stage_size),
    }[axis]
    for block in range(0, layout.world, size * stride):
        for first in range(block, block + stride):
            yield range(first, block + size * stride, stride)
