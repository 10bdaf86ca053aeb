"""What the launcher above this process was asked for, read from its command line.

``accelerate launch`` tells a lone process nothing about the number it was asked for, except that it then sets
MASTER_PORT; its command line, and the config file named there, have the number.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import yaml

_ENTRIES = ("accelerate", "accelerate-launch", "accelerate.commands.launch", "accelerate.commands.accelerate_cli")


def processes_asked_of_accelerate() -> int | None:
    """How many processes the accelerate launcher above us was asked for; ``None`` where there is none or it is 1."""
    if "MASTER_PORT" not in os.environ:  # set by accelerate for more than one process
        return None
    command = _accelerate_command_line()
    return _asked(command) if command else None


def _accelerate_command_line() -> list[str] | None:
    import psutil

    for process in psutil.Process().parents():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        for position, word in enumerate(words[:4]):
            if word in _ENTRIES or Path(word).name in (*_ENTRIES, "accelerate_cli.py", "launch.py"):
                return words[position + 1 :]
    return None


def _asked(words: Sequence[str]) -> int | None:
    number = _option(words, "--num_processes")
    if number is None:
        path = Path(_option(words, "--config_file") or _default_config())
        number = (yaml.safe_load(path.read_text()) or {}).get("num_processes") if path.is_file() else None
    return int(number) if number else None


def _option(words: Sequence[str], name: str) -> str | None:
    for position, word in enumerate(words):
        key, equals, value = word.partition("=")
        if key.replace("-", "_") == name.replace("-", "_"):
            return value if equals else next(iter(words[position + 1 :]), None)
    return None


def _default_config() -> Path:
    cache = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(cache).expanduser() / "accelerate" / "default_config.yaml"
