"""Recompute as the public API spells it."""

from polyreme.distributed.recompute_calls import recompute, recompute_hybrid, recompute_sequential

__all__ = ["recompute", "recompute_hybrid", "recompute_sequential"]
