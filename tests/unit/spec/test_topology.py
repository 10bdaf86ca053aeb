"""A layout says which of its axes stay among near ranks."""

import pytest

from moe_zoo.spec.errors import RecipeError
from moe_zoo.spec.layout import ParallelLayout
from moe_zoo.spec.topology import Cluster, describe, domains_crossed, ranks_per_domain, read_cluster
from tests.unit.spec.test_layout import recipe


def test_axes_are_told_by_the_domains_their_ranks_are_in():
    layout = ParallelLayout(world=64, ep=8, pp=2, tp=4, cp=2, replicate=2)
    assert domains_crossed(layout, 8) == {"tp": 1, "cp": 1, "ep": 1, "dp": 2, "pods": 2, "pp": 2}
    assert describe(layout, 8) == "8 nodes of 8: tp, cp, ep inside; dp across 2, pods across 2, pp across 2"
    assert describe(layout, 64) == "1 node of 64: tp, cp, ep, dp, pods, pp inside"


def test_a_group_that_does_not_begin_with_a_node_is_counted_where_it_lies():
    assert domains_crossed(ParallelLayout(world=12, ep=1, tp=4), 6)["tp"] == 2


def test_a_cluster_file_widens_the_domain(tmp_path):
    path = tmp_path / "nvl72.yaml"
    path.write_text("name: GB200 NVL72\nranks_per_domain: 72\n")
    assert read_cluster(path) == Cluster(name="GB200 NVL72", ranks_per_domain=72)
    assert ranks_per_domain(recipe(cluster=str(path)), 4) == 72
    assert ranks_per_domain(recipe(), 4) == 4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file"),
        ("[1]", "must hold keys and values"),
        ("name: x\nranks_per_domain: 0", "ranks_per_domain: 0; must be above 0"),
        ("name: x\nranks: 8", "ranks: unknown key"),
        ("name: \N{DEGREE SIGN}".encode("latin-1"), "can't decode"),
    ],
)
def test_a_cluster_file_that_says_nothing_is_refused_in_one_line(tmp_path, text, reason):
    path = tmp_path / "cluster.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecipeError) as refused:
        read_cluster(path)
    line = str(refused.value)
    assert line.startswith(f"cluster: {path}; ") and reason in line and "\n" not in line
