"""The cards of docs/cards are what the presets say, and the Hub can read them."""

from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from moe_zoo.models.card import all_cards, card
from moe_zoo.spec.accounting import num_active_parameters, num_parameters
from moe_zoo.spec.presets import load_preset, preset, preset_names

ROOT = Path(__file__).parents[3]
CARDS = all_cards(ROOT / "recipes")
LICENSES = {"apache-2.0", "mit", "other", "llama4", None}


@pytest.mark.parametrize("page", CARDS)
def test_a_card_is_what_its_preset_says(page):
    written = (ROOT / "docs" / "cards" / f"{page}.md").read_text(encoding="utf-8")
    assert written == CARDS[page], f"docs/cards/{page}.md is old: moe-zoo card --all docs/cards"


def test_no_card_is_left_of_a_preset_that_is_gone():
    assert {path.stem for path in (ROOT / "docs" / "cards").glob("*.md")} == CARDS.keys()


@pytest.mark.parametrize("name", preset_names())
def test_the_metadata_are_the_hubs(name):
    data = ModelCard(CARDS[name], ignore_metadata_errors=False).data
    assert data.license in LICENSES and (data.license == "other") == (data.get("license_name") is not None)
    assert data.base_model == preset(name).hub and data.pipeline_tag.endswith("generation")


def test_a_card_holds_the_counts_and_the_recipes():
    text = card("mixtral-8x7b").text
    total, active = num_parameters(load_preset("mixtral-8x7b")), num_active_parameters(load_preset("mixtral-8x7b"))
    assert f"{total / 1e9:,.1f} B" in text and f"{active / 1e9:,.1f} B" in text
    assert f"{16 * total / 2**30:,.1f} GiB" in text and f"{2 * total / 2**30:,.1f} GiB" in text
    assert "`recipes/tiny/switch_lm.yaml`" in CARDS["switch-lm-tiny"]
