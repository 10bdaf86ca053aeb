"""Make .venv and install what is needed into it; nothing happens where that is done. ``bootstrap.py [EXTRA]``.

torch goes first: the CPU build where there is no NVIDIA GPU (a tenth of the size), and before DeepSpeed, whose build
imports it. No compiler is needed. Standard library only.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "moe-zoo.stamp"
CONSTRAINTS = ROOT / "constraints.txt"
CPU_INDEX = os.environ.get("MOE_ZOO_TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
INDEX_TIMEOUT_S = 3.0


def main() -> None:
    extra = sys.argv[1] if len(sys.argv) > 1 else ""
    wanted = stamp()
    if STAMP.is_file() and PYTHON.exists():
        *stamped, extras = STAMP.read_text().split("\n")
        if stamped == [wanted] and (not extra or extra in extras.split(",")):
            return
    start = time.monotonic()
    make_venv()
    STAMP.unlink(missing_ok=True)
    install(extra)
    STAMP.write_text(f"{wanted}\n{extra}")
    print(f"bootstrap: .venv is ready after {time.monotonic() - start:.0f} s", flush=True)


def stamp() -> str:
    """Changes when the dependencies, the Python or the place of the clone do."""
    text = b"\0".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt", ".ci/bootstrap.py"))
    return hashlib.sha256(text + f"\0{sys.version}\0{ROOT}".encode()).hexdigest()


def make_venv() -> None:
    works = PYTHON.exists() and subprocess.run([PYTHON, "-c", "import pip"], capture_output=True).returncode == 0
    if not works:
        say(f"making .venv with Python {sys.version.split()[0]}")
        run(sys.executable, "-m", "venv", "--clear", VENV)


def install(extra: str) -> None:
    pip("setuptools", "wheel")
    say("installing torch")
    pip("torch", *torch_options())
    if sys.platform == "linux":
        say("installing deepspeed")
        pip("deepspeed", "--no-build-isolation")
    say("installing moe-zoo and the rest")
    pip("--no-build-isolation", "-e", f".[{extra}]" if extra else ".")


def torch_options() -> list[str]:
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists():
        return []
    return ["--extra-index-url", CPU_INDEX] if answers(CPU_INDEX) else []


def answers(index: str) -> bool:
    """Whether the index can be reached soon. A thread, because looking up a name heeds no time-out."""
    found: list[int] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(f"{index}/torch/", timeout=INDEX_TIMEOUT_S) as reply:
                found.append(reply.status)
        except OSError:
            pass

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    asker.join(INDEX_TIMEOUT_S)
    return found == [200]


def pip(*arguments: str) -> None:
    options = ("-qq", "--disable-pip-version-check", "--no-input", "--constraint", str(CONSTRAINTS))
    run(PYTHON, "-m", "pip", "install", *options, *arguments)


def run(*command: str | Path) -> None:
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"DS_BUILD_OPS": "0"}, stdin=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"error: bootstrap: {' '.join(map(str, command))} failed; see above; then run make again")


def say(text: str) -> None:
    print(f"bootstrap: {text}", flush=True)


if __name__ == "__main__":
    main()
