"""What 1.7 puts around an optimizer of a Program: averages, slow weights, and backward that computes values again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from polyreme.core import state, unique_name
from polyreme.eager.mode import no_grad
from polyreme.errors import ConfigError
from polyreme.ops.arithmetic import logical_and
from polyreme.ops.indices.gather import where
from polyreme.ops.math import minimum
from polyreme.program import gradient
from polyreme.program.block import Variable
from polyreme.program.current import default_main_program, program_guard
from polyreme.program.program import Program
from polyreme.static.average import ProgramAverage, assign_variable
from polyreme.static.variables import create_global_var

_MOST_ADDED = 16384  # additions after which a sum is put aside, so that a float32 term keeps 10 of its 24 bits in it


class ModelAverage(ProgramAverage):
    """The mean of each trainable parameter over a window of its latest values; make it after minimize().

    Those made with ParamAttr(do_model_average=False) are left out.

    The window is cut when it holds at least min_average_window values and at least
    min(max_average_window, average_window_rate * updates so far); the values before the cut count until the next one.
    `with average.apply(executor):` puts the means in place of the parameters. Raises ConfigError for regularization.
    """

    def __init__(
        self, average_window_rate: float, min_average_window: int = 10000, max_average_window: int = 10000,
        regularization: Any = None, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name)
        if regularization is not None:
            raise ConfigError("ModelAverage: regularization belongs to the optimizer whose steps are averaged")
        trained = [p for p in default_main_program().all_parameters() if not p.stop_gradient]
        self._parameters = [p for p in trained if p.do_model_average]
        self._updates, counted, before = (
            create_global_var([1], 0, "int64", True, name=self._new(what))
            for what in ("num_updates", "num_accumulates", "old_num_accumulates")
        )
        sums = [
            [create_global_var(p.shape, 0.0, p.dtype, True, name=self._new(f"{p.name}.sum_{n}")) for n in (1, 2, 3)]
            for p in self._parameters
        ]
        with no_grad():
            updates, count = self._updates + 1, counted + 1
            window = minimum((updates.astype("float64") * average_window_rate).astype("int64"), max_average_window)
            cut, full = logical_and(count >= min_average_window, count >= window), updates % _MOST_ADDED == 0
            for p, (first, second, third) in zip(self._parameters, sums, strict=True):
                latest = first + p
                aside, latest = where(full, latest + second, second), where(full, 0.0, latest)
                assign_variable(third, where(cut, latest + aside, third))
                assign_variable(first, where(cut, 0.0, latest))
                assign_variable(second, where(cut, 0.0, aside))
            assign_variable(before, where(cut, count, before))
            assign_variable(counted, where(cut, 0, count))
            assign_variable(self._updates, updates)
        with program_guard(self._corrected, Program()), no_grad():
            added = counted + before
            self._applied = [(a + b + c) / added.astype(a.dtype) for a, b, c in sums]


class LookaheadOptimizer:
    """Slow weights that move alpha of the way to the parameters every k steps, where these then go on from.

    Slow weights begin as the parameters are at the first step. In a Program; in dygraph use
    polyreme.incubate.LookAhead. Source: arXiv:1907.08610, algorithm 1.
    """

    def __init__(self, inner_optimizer: Any, alpha: float = 0.5, k: int = 5) -> None:
        if not hasattr(inner_optimizer, "minimize"):
            raise ConfigError(f"LookaheadOptimizer: inner_optimizer is an optimizer, got {inner_optimizer!r}")
        if not 0 <= alpha <= 1 or isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ConfigError(f"LookaheadOptimizer: alpha={alpha!r} is from 0 to 1, k={k!r} a whole number from 1 on")
        self.inner_optimizer, self.alpha, self.k = inner_optimizer, alpha, k

    def minimize(self, loss: Any, startup_program: Program | None = None) -> tuple[Any, list[tuple[Any, Any]]]:
        """The inner optimizer's minimize, and the slow step. Raises ConfigError in dygraph."""
        if not isinstance(loss, Variable):
            raise ConfigError("LookaheadOptimizer: it works in a Program; in dygraph use polyreme.incubate.LookAhead")
        with program_guard(loss.block.program, startup_program):
            trained = [p for p in default_main_program().all_parameters() if not p.stop_gradient]
            steps = create_global_var([1], 0, "int64", True, name=unique_name.generate("lookahead_steps"))
            slow = [create_global_var(p.shape, 0.0, p.dtype, True, name=f"{p.name}@SLOW") for p in trained]
            with no_grad():
                for p, weight in zip(trained, slow, strict=True):
                    assign_variable(weight, where(steps == 0, p, weight))
            recorded = self.inner_optimizer.minimize(loss, startup_program)
            with no_grad():
                assign_variable(steps, steps + 1)
                due = steps % self.k == 0
                for p, weight in zip(trained, slow, strict=True):
                    assign_variable(weight, where(due, weight + self.alpha * (p - weight), weight))
                    assign_variable(p, where(due, weight, p))
        return recorded


class RecomputeOptimizer:
    """optimizer, with a backward that keeps the checkpoints alone and computes again what lies between them.

    Source: arXiv:1604.06174. Set the checkpoints, Variables or names, by _set_checkpoints; other attributes are the
    optimizer's.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._checkpoints: list[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_optimizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def _set_checkpoints(self, checkpoints: Sequence[Any]) -> None:
        self._checkpoints = list(checkpoints)

    def load(self, stat_dict: Any) -> NoReturn:
        """Raises ConfigError, as it does in 1.7: a Program's state is loaded by fluid.load."""
        raise ConfigError("RecomputeOptimizer.load: use fluid.load, which has the optimizer's state too")

    def backward(
        self, loss: Any, startup_program: Program | None = None, parameter_list: Any = None, no_grad_set: Any = None,
        callbacks: Any = None, checkpoints: Any = None,
    ) -> list[tuple[Any, Any]]:  # fmt: skip
        """Record backward alone; -> [(parameter, gradient), ...]. Raises ConfigError without checkpoints."""
        chosen = self._checkpoints if checkpoints is None else list(checkpoints)
        if chosen is None:
            raise ConfigError("RecomputeOptimizer: there are no checkpoints; call _set_checkpoints([...]) first")
        with program_guard(loss.block.program, startup_program):
            return gradient.append_backward(loss, parameter_list, no_grad_set, callbacks, chosen)

    def apply_gradients(self, params_grads: Sequence[tuple[Any, Any]]) -> list[Any]:
        """The optimizer's."""
        return self._optimizer.apply_gradients(params_grads)

    def apply_optimize(
        self, loss: Any, startup_program: Program | None, params_grads: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        """The optimizer's."""
        return self._optimizer.apply_optimize(loss, startup_program, params_grads)

    def minimize(
        self, loss: Any, startup_program: Program | None = None, parameter_list: Any = None, no_grad_set: Any = None,
        grad_clip: Any = None,
    ) -> tuple[Any, list[tuple[Any, Any]]]:  # fmt: skip
        """Record backward and one step. Raises ConfigError for grad_clip, and in dygraph."""
        if grad_clip is not None or not state.recording():
            raise ConfigError(
                "RecomputeOptimizer.minimize: it works in a Program, where fluid.clip.set_gradient_clip sets clips; in "
                "dygraph use polyreme.distributed.fleet.utils.recompute"
            )
        pairs = self.backward(loss, startup_program, parameter_list, no_grad_set)
        return self.apply_optimize(loss, startup_program, pairs), pairs


__all__ = ["LookaheadOptimizer", "ModelAverage", "RecomputeOptimizer"]
