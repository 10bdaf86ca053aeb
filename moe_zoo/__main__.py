"""``python -m moe_zoo`` and ``torchrun -m moe_zoo``: the same program as ``moe-zoo``."""

from moe_zoo.cli import main

if __name__ == "__main__":
    main()
