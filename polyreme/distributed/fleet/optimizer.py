"""HybridParallelOptimizer: an optimizer of a hybrid-parallel job.

Gradients are global, the state is laid out by the plan and clipping sees global norms, all in the optimizer
itself; what is added here is gradient merge.
"""

from __future__ import annotations

from typing import Any

from polyreme.distributed.fleet.base.distributed_strategy import DistributedStrategy
from polyreme.distributed.fleet.base.job import Job, resolve
from polyreme.distributed.gradient_merge import MergingOptimizer
from polyreme.optimizer import Optimizer


class HybridParallelOptimizer(MergingOptimizer):
    """An optimizer under a strategy: everything it has, and `step` merges gradients if the strategy says so."""

    def __init__(self, optimizer: Optimizer, hcg: Any = None, strategy: Any = None, *, job: Job | None = None) -> None:
        if job is None:
            job = Job() if hcg is None else resolve(strategy or DistributedStrategy(), hcg.topology().world_size())
        super().__init__(optimizer, job.merge_steps, job.merge_average)
        self._hcg = hcg
