"""Counting tokens for experts, under the names that PaddlePaddle's scripts call."""

from polyreme.ops.experts.counts import assign_pos as _assign_pos
from polyreme.ops.experts.counts import limit_by_capacity as _limit_by_capacity
from polyreme.ops.experts.counts import number_count as _number_count
from polyreme.ops.experts.counts import prune_gate_by_capacity as _prune_gate_by_capacity
from polyreme.ops.experts.counts import random_routing as _random_routing

__all__ = ["_assign_pos", "_limit_by_capacity", "_number_count", "_prune_gate_by_capacity", "_random_routing"]
