"""Sharded checkpoints: raw bytes per rank, a hash per chunk, one manifest written last; readable in any layout."""

from moe_zoo.train.checkpoint.reader import Checkpoint, latest_checkpoint
from moe_zoo.train.checkpoint.writer import save_checkpoint

__all__ = ["Checkpoint", "latest_checkpoint", "save_checkpoint"]
