"""What every fleet of 1.7 is made of; the one that trains is in fleet.collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from polyreme.distributed.fleet.fleet import Fleet as Job
from polyreme.fluid.incubate.fleet.base.role_maker import PaddleCloudRoleMaker


class Mode:
    """How a fleet trains: COLLECTIVE is what there is."""

    TRANSPILER: ClassVar[int] = 1
    PSLIB: ClassVar[int] = 2
    COLLECTIVE: ClassVar[int] = 3


class Fleet(Job):
    """Base of a job of a script: init, then distributed_optimizer(...).minimize(loss)."""

    def split_files(self, files: Sequence[str]) -> list[str]:
        """This worker's part of the files: parts follow each other, and the first ones are longer by one if need be."""
        size, longer = divmod(len(files), self.worker_num())
        begin = self.worker_index() * size + min(self.worker_index(), longer)
        return list(files[begin : begin + size + (self.worker_index() < longer)])

    def all_reduce_worker(self, input: Any, output: np.ndarray) -> None:
        """Write into output the sum of every worker's input."""
        PaddleCloudRoleMaker(is_collective=True).all_reduce_worker(input, output)

    def distributed_optimizer(self, optimizer: Any, strategy: Any = None) -> DistributedOptimizer:
        """The optimizer that trains a Program for this job."""
        raise NotImplementedError(f"{type(self).__name__} needs distributed_optimizer")


class DistributedOptimizer:
    """Base of a fleet's optimizers: its backward and apply_gradients are those of the optimizer that it is made of."""

    def __init__(self, optimizer: Any, strategy: Any = None) -> None:
        self._optimizer, self._strategy = optimizer, strategy

    def backward(
        self, loss: Any, startup_program: Any = None, parameter_list: Any = None, no_grad_set: Any = None,
        callbacks: Any = None,
    ) -> list[tuple[Any, Any]]:  # fmt: skip
        """The optimizer's."""
        return self._optimizer.backward(loss, startup_program, parameter_list, no_grad_set, callbacks)

    def apply_gradients(self, params_grads: Sequence[tuple[Any, Any]]) -> list[Any]:
        """The optimizer's."""
        return self._optimizer.apply_gradients(params_grads)

    def minimize(
        self, losses: Any, scopes: Any = None, startup_programs: Any = None, parameter_list: Any = None,
        no_grad_set: Any = None,
    ) -> Any:  # fmt: skip
        """Let a fleet train."""
        raise NotImplementedError(f"{type(self).__name__} needs minimize")


__all__ = ["DistributedOptimizer", "Fleet", "Mode"]
