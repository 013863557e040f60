"""What every fleet of 1.7 is made of; the one that trains is in fleet.collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from polyreme.distributed.fleet.fleet import Fleet


class Mode:
    """How a fleet trains: COLLECTIVE is what there is."""

    TRANSPILER: ClassVar[int] = 1
    PSLIB: ClassVar[int] = 2
    COLLECTIVE: ClassVar[int] = 3


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
