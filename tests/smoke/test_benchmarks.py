"""Every benchmark runs at its smallest setting, and writes what it printed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["experts", "forward", "load", "step_time", "traffic"])
def test_a_benchmark_runs(module, tmp_path):
    out = tmp_path / "out.json"
    words = [sys.executable, "-m", f"benchmarks.{module}", "--quick", "--json", str(out)]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "does not run" not in done.stdout, done.stderr
    assert json.loads(out.read_text())
