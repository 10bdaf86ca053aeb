"""``moe-zoo certify``: JSON on stdout, progress on stderr, files in a folder, exit codes."""

import json

import pytest

from moe_zoo import cli


def certify(capfd, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["certify", *words])
    told = capfd.readouterr()
    return int(ended.value.code or 0), told.out, told.err


def test_two_factors_as_json(capfd, tmp_path):
    words = [
        "recipes/tiny/switch_lm.yaml",
        "--ranks",
        "2",
        "--factors",
        "engine,resume",
        "--json",
        "--out",
        str(tmp_path),
    ]
    code, out, err = certify(capfd, *words)
    printed = json.loads(out)
    assert code == 0 and printed["is_one_answer"] and printed == json.loads((tmp_path / "certificate.json").read_text())
    assert [row["factor"] for row in printed["factors"]] == ["engine", "resume"]
    assert "left 0:00" in err and "Setting accelerator" not in err
    assert (tmp_path / "certificate.md").exists() and (tmp_path / "ranks.log").exists()


def test_an_encoder_decoder_has_a_certificate(capfd, tmp_path):
    words = ["--ranks", "2", "--factors", "tp,resume", "--json", "--out", str(tmp_path)]
    code, out, _ = certify(capfd, "recipes/tiny/switch_encdec.yaml", *words)
    assert code == 0 and json.loads(out)["is_one_answer"]


def test_a_mistake_is_one_line_and_code_2(capfd, tmp_path):
    code, out, err = certify(capfd, "recipes/tiny/switch_lm.yaml", "--factors", "zero,tpp", "--out", str(tmp_path))
    assert (code, out) == (2, "")
    assert err == "error: --factors: 'tpp'; no such factor; did you mean 'tp'?\n"


def test_no_factor_at_all_is_not_every_factor(capfd, tmp_path):
    code, out, err = certify(capfd, "recipes/tiny/switch_lm.yaml", "--factors", "", "--out", str(tmp_path))
    assert (code, out) == (2, "") and err.startswith("error: --factors: ''; no such factor; known: ")
