"""A certificate fails for every planted bug, and names the factor and the quantity that it breaks."""

import re

import pytest

from moe_zoo.certify import Crew, certify
from moe_zoo.spec.recipe_file import load_recipe
from tests.distributed import planted

SWITCH, TOP_K = "recipes/tiny/switch_lm.yaml", "tests/distributed/top_k.yaml"
ZERO_0, FSDP = ["parallel.zero_stage=0"], ["parallel.engine=fsdp"]

BUGS = [  # planted, recipe, overrides, factors, what the verdict begins with; factors before the named one are innocent
    (planted.expert_gradients_times_ep, SWITCH, [], "engine,ep", "ep 2; gradient of layers.1.feed_forward.experts.w_"),
    (planted.router_gradients_not_summed_over_tp, SWITCH, [], "tp", "tp 2; gradient of layers.1.feed_forward.router"),
    (
        planted.whole_gradients_not_summed,
        SWITCH,
        ZERO_0,
        "combination",
        "combination: zero 0, gather step, ep auto; gradient of em",
    ),
    (
        planted.aux_loss_scaled_by_accumulation,
        SWITCH,
        [],
        "engine,accumulation",
        "accumulation: passes 4; gradient of",
    ),
    (planted.aux_loss_detached_from_the_router, SWITCH, FSDP, "zero", "zero 2; gradient of layers."),
    (
        planted.last_micro_batch_dropped,
        SWITCH,
        [],
        "accumulation",
        "accumulation: passes 4; counts of layer",
    ),
    (planted.loss_averaged_per_rank, SWITCH, FSDP, "zero", "zero 2; loss is off"),
    (planted.router_bias_from_local_counts, TOP_K, FSDP, "zero", "zero 2; bias of layers."),
    (
        planted.norm_counts_replicas_twice,
        SWITCH,
        ZERO_0,
        "combination",
        "combination: zero 0, gather step, ep auto; norm is off",
    ),
    (planted.statistics_counted_in_forward, SWITCH, [], "engine,recompute", "recompute 1; counts of layer"),
    (planted.jitter_from_local_rows, SWITCH, FSDP, "zero", "zero 2; "),
    (planted.capacity_of_the_local_batch, SWITCH, FSDP, "zero", "zero 2; dropped of layer"),
    (planted.documents_forgotten_in_stages, SWITCH, [], "pp", "pp 2, passes 4; "),
    (
        planted.ranks_cut_before_micro_batches,
        SWITCH,
        [],
        "order",
        "order: every split over ranks; order of micro-batch",
    ),
    (planted.every_rank_loads_the_first_experts, SWITCH, [], "resume", "resume: saved at zero 3"),
    (planted.moments_start_anew, SWITCH, [], "resume", "resume: saved at zero 3"),
    (planted.only_the_first_rank_saves_experts, SWITCH, [], "resume", "resume: saved at zero 3"),
]


@pytest.mark.parametrize(("bug", "recipe", "overrides", "factors", "told"), BUGS, ids=[bug[0].__name__ for bug in BUGS])
def test_a_planted_bug_is_named(bug, recipe, overrides, factors, told):
    certificate = certify(load_recipe(recipe, overrides), Crew(2, around=bug), factors.split(","))
    assert certificate.verdict.startswith(f"broken: {told}"), certificate.verdict
    if factors == "resume":
        assert WHAT_A_RESUMED_RUN_LACKS[bug] in certificate.verdict


WHAT_A_RESUMED_RUN_LACKS = {
    planted.every_rank_loads_the_first_experts: "restored of ",
    planted.moments_start_anew: "restored of exp_avg",
    planted.only_the_first_rank_saves_experts: "every element must be saved once",
}


def test_without_a_bug_it_is_one_answer():
    certificate = certify(load_recipe(TOP_K), Crew(2), ["order", "ep", "combination"])
    assert certificate.verdict == "one answer: 3 layouts of top-k take the steps of one process"


def test_a_rank_that_raises_ends_its_own_case_alone(tmp_path):
    log = tmp_path / "ranks.log"
    certificate = certify(load_recipe(SWITCH), Crew(2, log, planted.one_rank_raises), ["ep", "tp"])
    assert [result.status for result in certificate.results] == ["failed", "equal"]
    assert certificate.verdict == "broken: ep 2; rank 1: RuntimeError: out of memory"
    assert "Traceback" in log.read_text()


def test_a_rank_that_hangs_is_a_failure_too():
    certificate = certify(load_recipe(SWITCH), Crew(2, around=planted.one_rank_hangs, timeout_s=5), ["ep"])
    assert re.match(r"broken: ep 2; rank \d: .*[Tt]imed out", certificate.verdict), certificate.verdict
