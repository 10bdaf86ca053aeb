"""Where a fault began is named, by step and by cause; what is kept can be checked."""

import json
import math

import torch

from moe_zoo.certify.certificate import Certificate, Result, judge, tolerances, why, write
from moe_zoo.certify.display import markdown_table
from moe_zoo.certify.measure import Deviation, error_of, sizes
from moe_zoo.spec.recipe_file import load_recipe
from moe_zoo.train.checkpoint.format import digest


def certificate(*results) -> Certificate:
    recipe = load_recipe("recipes/tiny/switch_lm.yaml")
    return Certificate(recipe, 4, {"model.d_model": (128, 16)}, {}, list(results), 12.0)


def test_the_first_step_and_the_first_cause_are_named_not_the_largest_error():
    found = [
        Deviation("weight", "embed.weight", 1, 0.9),
        Deviation("gradient", "head.weight", 1, 0.2),
        Deviation("gradient", "embed.weight", 1, 0.3),
        Deviation("loss", "", 2, 5.0),
    ]
    result = judge("ep", "ep 2", found, {}, 1.0)
    assert (result.status, why(result)) == ("differs", "gradient of embed.weight is off by 3.0e-01 at step 1")
    assert result.worst["loss"].error == 5.0


def test_what_is_not_a_number_is_wrong():
    assert error_of(torch.tensor([math.nan]), torch.zeros(1), 1.0) == math.inf
    result = judge("ep", "ep 2", [Deviation("loss", "", 1, math.inf)], {}, 1.0)
    assert result.status == "differs"
    json.dumps(certificate(result).to_dict(), allow_nan=False)


def test_a_certificate_of_nothing_says_so():
    nothing = certificate(Result("ep", "ep 2", "not applicable", {}, reason="no experts"))
    assert nothing.verdict == "nothing was measured: none of these factors applies to switch-lm-tiny"


def test_small_parameters_are_measured_by_a_share_of_the_largest():
    assert sizes({"a": torch.tensor([2.0, -4.0]), "b": torch.tensor(1e-9)}) == {"a": 4.0, "b": 0.04}
    assert sizes({"a": torch.zeros(3)}) == {"a": 1.0}


def test_a_tolerance_grows_with_the_rounding_of_one_process_and_never_shrinks():
    limits = tolerances({"gradient": Deviation("gradient", "w", 1, 1e-4), "norm": Deviation("norm", "", 1, 1e-9)})
    assert limits["gradient"] == 20 * 1e-4 and limits["norm"] == 1e-5


def test_the_kept_certificate_carries_its_own_hash(tmp_path):
    good = judge("ep", "ep 2", [Deviation("loss", "", 1, 0.0)], {}, 1.0)
    bad = judge("pp", "pp 2", [Deviation("norm", "", 1, 0.5)], {}, 1.0)
    body = write(certificate(good, bad), tmp_path, markdown_table(certificate(good, bad)))
    kept = json.loads((tmp_path / "certificate.json").read_text())
    assert kept == body and kept.pop("sha256") == digest(kept)
    assert kept["verdict"] == "broken: pp 2; norm is off by 5.0e-01 at step 1" and not kept["is_one_answer"]
    text = (tmp_path / "certificate.md").read_text()
    assert "| pp 2 |" in text and "- pp 2: differs: norm is off by 5.0e-01 at step 1" in text
