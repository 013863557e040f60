"""Recompute as the public API spells it."""

from polyreme.distributed.fleet.recompute.calls import recompute, recompute_hybrid, recompute_sequential

__all__ = ["recompute", "recompute_hybrid", "recompute_sequential"]
