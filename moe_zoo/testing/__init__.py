"""Helpers for our tests, and for those who add a model outside this repository."""

from moe_zoo.comm.rank_pool import RankError, run_distributed

__all__ = ["RankError", "run_distributed"]
