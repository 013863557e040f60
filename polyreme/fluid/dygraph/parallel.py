"""Dygraph on many processes, started by the launcher."""

from __future__ import annotations

from typing import Any

from polyreme import distributed
from polyreme.distributed.parallel import ParallelEnv, init_parallel_env
from polyreme.errors import ConfigError
from polyreme.fluid.dygraph.layers import Layer


class ParallelStrategy:
    """What a process knows of the job: filled in by prepare_context."""

    nranks: int
    local_rank: int
    trainer_endpoints: list[str]
    current_endpoint: str

    def __init__(self) -> None:
        env = ParallelEnv()
        self.nranks, self.local_rank = env.nranks, env.local_rank
        self.trainer_endpoints, self.current_endpoint = env.trainer_endpoints, env.current_endpoint


def prepare_context(strategy: ParallelStrategy | None = None) -> ParallelStrategy:
    """Join the processes that the launcher started; -> what this one knows of the job.

    strategy: one of the same job, to be checked. Raises ConfigError if it is of another.
    """
    init_parallel_env()
    joined = ParallelStrategy()
    if strategy is not None and (strategy.nranks, strategy.local_rank) != (joined.nranks, joined.local_rank):
        raise ConfigError(
            f"prepare_context: the strategy says process {strategy.local_rank} of {strategy.nranks}, this is "
            f"{joined.local_rank} of {joined.nranks}; start the processes with the launcher, which sets both"
        )
    return joined


class DataParallel(Layer, distributed.DataParallel):
    """layers, trained on every process at once: gradients are averaged after backward().

    strategy: what prepare_context gave. scale_loss and apply_collective_grads leave nothing to do.
    """

    def __init__(self, layers: Any, strategy: ParallelStrategy | None) -> None:
        if strategy is not None and not isinstance(strategy, ParallelStrategy):
            raise ConfigError(f"DataParallel: strategy is what prepare_context() gave, got {type(strategy).__name__}")
        super().__init__(layers)


Env = ParallelEnv

__all__ = ["DataParallel", "Env", "ParallelEnv", "ParallelStrategy", "prepare_context"]
