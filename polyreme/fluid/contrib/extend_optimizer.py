"""fluid.contrib.extend_optimizer: optimizers with weight decay that is no part of the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyreme.fluid.layers.tensor import assign
from polyreme.fluid.optimizer import Optimizer
from polyreme.program.current import program_guard


def extend_with_decoupled_weight_decay(base_optimizer: type[Optimizer]) -> type[Optimizer]:
    """A class whose optimizers first shrink each parameter: p (1 - weight_decay), then the step of base_optimizer.

    It is made with weight_decay, a number or Variable, apply_decay_param_fun (name -> whether that parameter shrinks;
    None: all do), and base_optimizer's arguments by name. Source: Loshchilov and Hutter, 2017, arXiv:1711.05101, where
    weight_decay is multiplied by the rate too. Raises TypeError for what is no class of fluid.optimizer.
    """
    if not (isinstance(base_optimizer, type) and issubclass(base_optimizer, Optimizer)):
        raise TypeError(
            "extend_with_decoupled_weight_decay takes a class of fluid.optimizer, such as fluid.optimizer.Adam, got "
            f"{base_optimizer!r}"
        )

    class OptimizerWithDecoupledWeightDecay(base_optimizer):  # type: ignore[misc,valid-type]
        """base_optimizer, and a decay of its own."""

        def __init__(
            self, weight_decay: Any, apply_decay_param_fun: Callable[[str], bool] | None = None, **kwargs: Any
        ) -> None:
            super().__init__(**kwargs)
            self._coefficient, self._applies = weight_decay, apply_decay_param_fun

        def apply_optimize(self, loss: Any, startup_program: Any, params_grads: Any) -> list[Any]:
            """One step, behind the decay, in the Program of loss."""
            with program_guard(loss.block.program, startup_program):
                for parameter, _ in params_grads:
                    if self._applies is None or self._applies(parameter.name):
                        assign(parameter - parameter * self._coefficient, output=parameter)
            return super().apply_optimize(loss, startup_program, params_grads)

    return OptimizerWithDecoupledWeightDecay


__all__ = ["extend_with_decoupled_weight_decay"]
