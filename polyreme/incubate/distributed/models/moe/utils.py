"""Counting what a gate chose."""

from polyreme.distributed.models.moe.counting import count_by_gate, limit_by_capacity

__all__ = ["count_by_gate", "limit_by_capacity"]
