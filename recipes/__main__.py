"""``accelerate launch recipes/ recipes/tiny/switch_lm.yaml train.steps=50`` is ``moe-zoo train`` with the same words."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works before it is installed

from moe_zoo.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
