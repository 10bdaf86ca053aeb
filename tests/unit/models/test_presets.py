"""Presets are what they say: the built model counts as the formulas do, and its family has a model of these numbers."""

import time

import pytest
import torch

from moe_zoo.models.families import FAMILIES
from moe_zoo.models.source import difference
from moe_zoo.models.switch import make_network
from moe_zoo.spec.accounting import num_parameters
from moe_zoo.spec.presets import load_preset, preset, preset_names

OF_FAMILIES = [name for name in preset_names() if preset(name).family in FAMILIES]


def test_every_preset_is_built_on_the_meta_device_in_seconds_and_counts_as_the_formula_does():
    began = time.process_time()
    for name in preset_names():
        architecture = load_preset(name)
        with torch.device("meta"):
            model = make_network(architecture)
        assert sum(param.numel() for param in model.parameters()) == num_parameters(architecture), name
    assert time.process_time() - began < 60


@pytest.mark.parametrize("name", OF_FAMILIES)
def test_the_family_of_a_preset_has_a_model_of_these_numbers(name):
    family, architecture = FAMILIES[preset(name).family], load_preset(name)
    again = family.read(family.make_config(family.write(architecture)))
    assert difference(again, architecture) is None


def test_every_family_has_a_published_size_and_a_tiny_one():
    dense, twice = {"llama", "mistral", "qwen2", "qwen3"}, {"bailing_moe_v2"}
    sizes = {preset(name).family for name in OF_FAMILIES if not name.endswith("-tiny")}
    tiny = {preset(name).family for name in OF_FAMILIES if name.endswith("-tiny")}
    only_tiny = {"granitemoeshared"}  # IBM published none of this kind alone
    assert tiny == FAMILIES.keys() - dense - twice
    assert sizes == tiny - only_tiny
