"""The training loop and what it needs: data feed, schedule, checkpoints, metrics."""
