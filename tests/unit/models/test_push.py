"""Models travel through a hub and come back bit-equal."""

import os
import subprocess
import sys

import pytest
from huggingface_hub import ModelCard

from tests.fake_hub import fake_hub
from tests.unit.models.test_families import QWEN, theirs

SCRIPT = """
import sys
import torch
import moe_zoo

torch.manual_seed(0)
source, name = sys.argv[1:]
model = moe_zoo.load(source)
model.push_to_hub(name, token="hf_nobody")
ids = torch.tensor([[5, 9, 13, 21]])
assert torch.equal(moe_zoo.load(name)(ids).logits, model(ids).logits)
try:
    moe_zoo.load("zoo/nothing")
except moe_zoo.MoeZooError as error:
    print(error)
"""


def push(source: str, name: str, endpoint: str, home) -> str:
    environment = {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", SCRIPT, source, name]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_a_model_is_pushed_and_loaded_by_its_id(kind, tmp_path):
    source = "topk-lm-test"
    if kind == "theirs":
        source = str(tmp_path / "qwen")
        theirs("qwen3_moe", QWEN).save_pretrained(source)
    with fake_hub() as (endpoint, repositories):
        told = push(source, "zoo/tiny", endpoint, tmp_path / "home")
    files = repositories["zoo/tiny"]
    assert {"config.json", "model.safetensors", "README.md"} <= files.keys()
    assert ("modeling_moe_zoo.py" in files) == (kind == "ours")
    assert ModelCard(files["README.md"].decode()).data.library_name
    assert told.splitlines()[-1].startswith("load: zoo/nothing; not a folder, a reachable Hub id or a preset (")
