"""``moe-zoo certify``: progress on stderr, the table or JSON on stdout, both in a folder."""

import json
from pathlib import Path

import torch
from rich.console import Console

from moe_zoo.certify.certificate import Certificate, write
from moe_zoo.certify.crew import Crew
from moe_zoo.certify.display import Display, markdown_table, print_certificate
from moe_zoo.certify.run import certify
from moe_zoo.spec.errors import RecipeError
from moe_zoo.spec.recipe import Recipe
from moe_zoo.spec.topology import ranks_per_domain

LOG = "ranks.log"  # what the ranks print


def run(recipe: Recipe, ranks: int, factors: str | None, out: Path, as_json: bool) -> Certificate:
    """Make, print and keep a certificate."""
    ranks_per_domain(
        recipe, ranks
    )  # the twin has nodes of its own, but a cluster file that cannot be read is a mistake
    names = None if factors is None else factors.split(",")
    _make_folder(out)
    torch.set_num_threads(1)  # the ranks need the cores
    display = Display(ranks)
    try:
        certificate = certify(recipe, Crew(ranks, out / LOG), names, display.report)
    finally:
        display.close()
    body = write(certificate, out, markdown_table(certificate))
    if as_json:
        print(json.dumps(body))
    else:
        console = Console(highlight=False)
        print_certificate(certificate, console)
        console.print(f"kept in {out}", markup=False, soft_wrap=True)
    return certificate


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / LOG).write_text("")
    except OSError as error:
        raise RecipeError(
            f"--out: {out}; {error.strerror or error}; the certificate is kept there; name another"
        ) from None
