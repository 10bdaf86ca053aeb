"""Every command line in README, docs and recipe headers is one that exists: verbs, options, files, recipes, tests."""

import argparse
import re
import shlex
from pathlib import Path

import pytest
import typer

from moe_zoo import cli
from moe_zoo.spec.errors import MoeZooError
from moe_zoo.spec.layout import resolve_layout
from moe_zoo.spec.recipe_file import load_recipe
from moe_zoo.train.compare import check_same_tokens

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
PROGRAMS = ("moe-zoo", "accelerate launch", "torchrun", "pytest", "make")
VERBS = typer.main.get_command(cli.app)


def documented() -> list:
    """(where, command) of every fenced line, `inline` span, recipe comment and epilogue that starts with a program."""
    found = [(page.name, line) for page in PAGES for line in fenced(page.read_text()) + inline(page.read_text())]
    for recipe in RECIPES:
        comment = "\n".join(re.findall(r"^#   (.*)", recipe.read_text(), re.M))
        found += [(recipe.name, line) for line in re.sub(r"\\\n\s*", "", comment).splitlines()]
    found += [(name, verb.epilog.removeprefix("Example: ")) for name, verb in VERBS.commands.items()]
    commands = {(where, line.removeprefix("$ ").partition("#")[0].strip()): None for where, line in found}
    return [pytest.param(line, id=f"{where}: {line}") for where, line in commands if is_command(line)]


def fenced(text: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)
    return [line for language, block in blocks if not language for line in block.splitlines()]


def inline(text: str) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)


def is_command(line: str) -> bool:
    """A command, and not a word in running text such as `torchrun` or `moe-zoo train | prepare`."""
    return " | " not in line and any(line.startswith(f"{program} ") for program in PROGRAMS)


def test_the_pages_hold_commands():
    lines = [case.values[0] for case in documented()]
    assert all(any(line.startswith(program) for line in lines) for program in PROGRAMS)
    assert "accelerate launch recipes/ recipes/tiny/switch_lm.yaml train.steps=50" in lines


@pytest.mark.parametrize("line", documented())
def test_a_documented_command_exists(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    program = next(name for name in PROGRAMS if line.startswith(name))
    words = shlex.split(line.removeprefix(program).partition(" > ")[0])
    CHECKS[program](words)


def moe_zoo(words: list[str]) -> None:
    verb, *rest = words
    asked = VERBS.commands[verb].make_context(verb, rest).params
    overrides = asked.get("overrides") or asked.get("override") or ()
    recipes = asked.get("recipes") or ([asked["recipe"]] if "recipe" in asked else [])
    for path in recipes:
        plan(path, overrides, asked.get("processes") or asked.get("ranks") or 1)
    if verb == "compare":
        check_same_tokens([load_recipe(path, overrides) for path in recipes])
    if verb == "demo":
        plan("recipes/tiny/switch_lm.yaml", overrides, 2)
    if verb == "tokenizer":
        assert Path(asked["spec"]).is_file()


def plan(path: str | Path, overrides, processes: int) -> None:
    """A recipe that is named in capitals stands for any."""
    if str(path) != "RECIPE":
        resolve_layout(load_recipe(path, overrides), processes, processes)


def accelerate(words: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    asked = launch_command_parser().parse_args(words)
    assert asked.config_file is None or Path(asked.config_file).is_file()
    script = Path(asked.training_script)
    assert (script / "__main__.py").is_file()
    moe_zoo(["train", *asked.training_script_args])


def torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    asked = get_args_parser().parse_args(words)
    assert asked.module and asked.training_script == "moe_zoo"
    moe_zoo(asked.training_script_args)


def run_pytest(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", default="")
    parser.add_argument("paths", nargs="*")
    asked = parser.parse_args(words)
    assert set(re.findall(r"\w+", asked.m)) <= {"not", "and", "slow", "gpu"}
    assert all((ROOT / path).exists() for path in asked.paths)


def make(words: list[str]) -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    assert all(word in targets or word.startswith("PYTHON=") for word in words)


CHECKS = {"moe-zoo": moe_zoo, "accelerate launch": accelerate, "torchrun": torchrun, "pytest": run_pytest, "make": make}


@pytest.mark.parametrize("words", [["trian", "r.yaml"], ["train", "--process", "2"], ["train", "nowhere.yaml"]])
def test_a_command_that_does_not_exist_would_be_noticed(words):
    usage_error = typer.BadParameter.__base__  # of click, which typer may carry inside
    with pytest.raises((KeyError, usage_error, MoeZooError)):
        moe_zoo(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_tests_that_a_page_names_exist(page):
    """A picture may still be to come: it is drawn by a run."""
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert link.endswith(".png") or (page.parent / link).exists(), link
    for path in re.findall(r"`((?:tests|recipes|moe_zoo|data_pipelines|docs|tokenizers)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    sources = {file.name: file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}
    file = None
    for name, test in re.findall(r"`(test_\w+\.py)?::(test_\w+)`", text):
        file = name or file
        assert f"def {test}(" in sources[file], f"{file}::{test}"
