"""Fixtures that several folders share."""

from pathlib import Path

import pytest

from data_pipelines import PrepareSpec, prepare

TOKENIZER = Path(__file__).parents[1] / "tokenizers" / "stdlib-1k"
SEQ_LEN = 32


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    """A prepared corpus of a few hundred rows."""
    root = tmp_path_factory.mktemp("corpus")
    (root / "text").mkdir()
    for index in range(60):
        words = " ".join(f"value_{(index * 7 + i * i) % 97} = {i % 13}" for i in range(80))
        (root / "text" / f"file{index:02}.py").write_text(f'"""File {index}."""\n{words}\n')
    spec = PrepareSpec(source=root / "text", tokenizer=TOKENIZER, output=root / "data", seq_len=SEQ_LEN, workers=1)
    prepare(spec)
    return root / "data"


@pytest.fixture
def run_values(tiny_data, tmp_path) -> dict:
    """A recipe of six steps that takes seconds, as plain values: change it, then ``Recipe.from_dict``."""
    from moe_zoo.spec.presets import load_preset

    model = load_preset("topk-lm-test").to_dict() | {"vocab_size": 1024}
    model["moe"]["router"]["jitter"] = 0.05
    return {
        "name": "run",
        "model": model,
        "data": {"path": str(tiny_data), "tokenizer": str(TOKENIZER), "seq_len": SEQ_LEN},
        "train": {"steps": 6, "global_batch": 8, "micro_batches": 2, "eval_rows": 6, "sample_tokens": 4},
        "optim": {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 2},
        "balance": {"method": "bias", "bias_update_rate": 0.05, "z_coefficient": 0.01},
        "checkpoint": {"every": 3, "keep": None},
        "log": {"folder": str(tmp_path / "runs"), "every": 2, "wandb": "off"},
    }
