"""The command line: one line for a mistake, JSON for a program, help with an example."""

import subprocess
import sys
from pathlib import Path

import pytest

from moe_zoo import cli

COMMANDS = [*cli.app.registered_commands, *cli.model_app.registered_commands]
VERBS = [command.name or command.callback.__name__ for command in COMMANDS]


def run(capsys, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    told = capsys.readouterr()
    return int(ended.value.code or 0), told.out, told.err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(capsys, verb):
    code, out, _ = run(capsys, verb, "--help")
    assert code == 0
    assert f"Example: moe-zoo {verb}" in out


def test_a_mistake_is_one_line_and_code_2(capsys):
    code, out, err = run(capsys, "train", "nowhere.yaml")
    assert (code, out) == (2, "")
    assert err == "error: nowhere.yaml: no such file or directory; must be a recipe; check the path\n"


def test_a_mistake_of_the_data_pipeline_is_one_line_too(capsys, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "name: r\nmodel: {preset: switch-lm-test}\ntrain: {steps: 2, global_batch: 2}\noptim: {lr: 1e-3}\n"
        f"data: {{path: {tmp_path / 'out'}, tokenizer: {tmp_path / 'none'}, seq_len: 8}}\n"
    )
    code, _, err = run(capsys, "prepare", str(recipe))
    assert code == 2
    assert err.startswith("error: ") and err.count("\n") == 1


def test_a_rank_other_than_0_tells_its_mistake_with_its_number(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(cli, "REPORT_AFTER_S", 0.0)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)  # the test's own handlers stay
    code, _, err = run(capsys, "train", "nowhere.yaml")
    assert code == 2
    assert err.startswith("rank 3: nowhere.yaml: ")


def test_an_unknown_verb_or_option_is_refused_with_code_2(capsys):
    assert run(capsys, "trian")[0] == 2
    assert run(capsys, "train", "r.yaml", "--processes", "0")[0] == 2


def test_the_schema_is_the_published_one(capsys):
    published = Path(__file__).parents[2] / "docs" / "recipe.schema.json"
    assert run(capsys, "schema")[1] == published.read_text()


def test_a_refusal_costs_no_torch():
    code = "import sys, moe_zoo.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_public_names_exist_and_an_unknown_one_does_not():
    import moe_zoo

    assert moe_zoo.load_preset("switch-lm-test") == moe_zoo.load_preset("switch-lm-test")
    assert "load_recipe" in dir(moe_zoo)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        moe_zoo.nothing  # noqa: B018
