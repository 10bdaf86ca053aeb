"""The bootstrap: which torch it takes, and when it has nothing to do."""

import importlib.util
import re
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bootstrap(monkeypatch):
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / ".ci" / "bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Index(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/whl/cpu/torch/" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_an_index_that_answers_is_used_and_one_that_does_not_is_left_out(bootstrap):
    server = HTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        assert bootstrap.answers(f"{address}/whl/cpu")
        assert not bootstrap.answers(f"{address}/other")
    finally:
        server.shutdown()
        server.server_close()
    assert not bootstrap.answers(f"{address}/whl/cpu"), "nobody listens any more"


def test_an_index_that_never_answers_costs_the_time_out_and_no_more(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap, "INDEX_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        assert not bootstrap.answers(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert time.monotonic() - start < 3


def test_a_machine_with_a_gpu_takes_the_usual_torch(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap, "answers", lambda index: True)
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert bootstrap.torch_options() == []


def test_a_stamped_environment_is_left_alone_until_it_lacks_something(bootstrap, tmp_path, monkeypatch):
    installed = []
    monkeypatch.setattr(bootstrap, "install", installed.append)
    monkeypatch.setattr(bootstrap, "make_venv", lambda: None)
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / "stamp")
    for extra in ("", "", "dev", "dev", ""):
        monkeypatch.setattr(bootstrap.sys, "argv", ["bootstrap.py", *filter(None, [extra])])
        bootstrap.main()
    assert installed == ["", "dev"]
    monkeypatch.setattr(bootstrap, "stamp", lambda: "other dependencies")
    bootstrap.main()
    assert len(installed) == 3


def test_constraints_pin_every_direct_dependency():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    assert {re.match(r"[\w.-]+", word)[0].lower() for word in wanted} <= pinned


def test_make_says_in_one_line_that_there_is_no_python():
    done = subprocess.run(["make", "-s", "setup", "PYTHON="], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        "error: Python: none of python3.13 python3.12 python3.11 python3 is 3.11 or newer and has venv; "
        "moe-zoo needs one; install one, or run make PYTHON=/path/to/python"
    )
