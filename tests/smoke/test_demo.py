"""The demo, shortened: the commands of the README, and every door through which its model is loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import moe_zoo
from moe_zoo.models.generation import generate_text
from tests.helpers import run_where_moe_zoo_is_not_installed

ROOT = Path(__file__).parents[2]
SMALL = ["train.steps=4", "train.global_batch=4", "train.eval_rows=8", "train.eval_every=0", "optim.warmup_steps=1"]
SMALL += ["optim.decay_steps=1", "model.num_layers=2", "model.d_model=64", "train.sample_tokens=2"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    (folder / "text").mkdir()
    for source in sorted((ROOT / "moe_zoo").rglob("*.py")) + sorted((ROOT / "data_pipelines").rglob("*.py")):
        (folder / "text" / f"{source.parent.name}_{source.name}").write_text(source.read_text())
    places = [f"data.source={folder / 'text'}", f"data.path={folder / 'data'}", f"log.folder={folder / 'runs'}"]
    done = subprocess.run(
        [sys.executable, "-m", "moe_zoo", "demo", *SMALL, *places, "name=small"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return folder, done


def test_it_goes_from_text_to_text_and_judges_itself(demo):
    folder, done = demo
    assert done.returncode == 2, done.stderr  # four steps do not beat a bigram, and the demo says so
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: demo: validation loss ") and "should be below the bigram's" in last
    assert "2 ranks = dp 2, edp 1 x ep 2; deepspeed zero_stage=3" in done.stdout or sys.platform != "linux"
    for word in ("unigram", "bigram, absolute discounting", "this Switch model", "Text it writes", "step 4/4"):
        assert word in done.stdout
    assert "Traceback" not in done.stderr
    names = {path.name for path in (folder / "runs" / "small").iterdir()}
    assert {"recipe.yaml", "metrics.jsonl", "checkpoints", "model", "loss.png"} <= names


def test_its_model_comes_back_through_every_door(demo, tmp_path):
    model_folder = demo[0] / "runs" / "small" / "model"
    ids = torch.tensor([[1, 50, 60, 70]])
    expected = moe_zoo.load(model_folder)(ids).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(model_folder)(ids).logits, expected)
    torch.save(expected, tmp_path / "expected.pt")
    script = f"""
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({str(model_folder)!r}, trust_remote_code=True)
torch.testing.assert_close(model(torch.tensor({ids.tolist()})).logits, torch.load({str(tmp_path / "expected.pt")!r}))
tokenizer = AutoTokenizer.from_pretrained({str(model_folder)!r})
assert tokenizer.decode(tokenizer.encode("def f(x):", add_special_tokens=False)) == "def f(x):"
"""
    run_where_moe_zoo_is_not_installed(script, tmp_path)


def test_its_tokenizer_stands_beside_it_and_text_comes_out(demo):
    run = demo[0] / "runs" / "small"
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    text = "class A:\n    def f(self):\n        return 'é'\n"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    greedy = [generate_text(run, "def ", num_tokens=6, temperature=0) for _ in range(2)]
    assert greedy[0] == greedy[1] and isinstance(greedy[0], str)
