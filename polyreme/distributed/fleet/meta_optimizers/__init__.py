"""fleet.meta_optimizers: what an optimizer becomes in a hybrid-parallel job. What the other names of this module did
is a setting of the strategy, or refused by it (docs/fleet.md)."""

from polyreme.distributed.fleet.optimizer import HybridParallelOptimizer

__all__ = ["HybridParallelOptimizer"]
