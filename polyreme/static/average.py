"""Averages of the parameters of a Program that its runs keep: ExponentialMovingAverage, and what others share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from polyreme.core import state, unique_name
from polyreme.eager.mode import no_grad
from polyreme.errors import ConfigError, ProgramError
from polyreme.program.current import default_main_program, of_training, program_guard
from polyreme.program.program import Program
from polyreme.program.scope import global_scope
from polyreme.static.variables import create_global_var


class ProgramAverage:
    """Averages in place of the parameters of a Program for a while. A subclass records how they are kept.

    _parameters; _updates: the Variable that counts updates; _corrected: a Program that computes _applied, the average
    of each parameter.
    """

    _parameters: list[Any]
    _updates: Any
    _corrected: Program
    _applied: list[Any]

    def __init__(self, name: str | None) -> None:
        if not state.recording():
            raise ProgramError(f"{type(self).__name__} averages parameters of a static Program; call enable_static()")
        self._name = f"{name}." if name else ""
        self._saved: dict[str, np.ndarray] = {}
        self._corrected = Program()

    def _new(self, what: str) -> str:
        return unique_name.generate(f"{self._name}{what}")

    @contextmanager
    def apply(self, executor: Any, need_restore: bool = True) -> Iterator[None]:
        """Put the averages in place of the parameters in the global scope inside the block, and on if not need_restore.

        Raises ProgramError before the first update has run.
        """
        scope = global_scope()
        steps = scope.find_var(self._updates.name)
        if steps is None or not np.asarray(steps.get_tensor()).item():
            raise ProgramError(f"{type(self).__name__}.apply: no update() has run yet in this scope")
        values = executor.run(self._corrected, fetch_list=self._applied)
        for p, value in zip(self._parameters, values, strict=True):
            held = scope.var(p.name).get_tensor()
            self._saved[p.name] = np.asarray(held)
            held.set(value)
        try:
            yield
        finally:
            if need_restore:
                self.restore(executor)

    def restore(self, executor: Any) -> None:
        """Put the parameters back that apply() replaced. Raises ProgramError if it replaced none."""
        if not self._saved:
            raise ProgramError(f"{type(self).__name__}.restore: nothing was replaced; call apply() first")
        for name, value in self._saved.items():
            global_scope().var(name).get_tensor().set(value)
        self._saved = {}


class ExponentialMovingAverage(ProgramAverage):
    """A running average of every trainable parameter of the main Program: average = decay * average + (1 - decay) * p.

    The average starts from zero, so what apply() gives is average / (1 - decay^updates), as in arXiv:1412.6980,
    section 3. thres_steps: a Variable with the number of steps; decay is then min(decay, (1 + steps) / (10 + steps)).
    Call update() after minimize(), in the same Program.
    """

    def __init__(self, decay: float = 0.999, thres_steps: Any = None, name: str | None = None) -> None:
        super().__init__(name)
        if not 0 <= decay < 1:
            raise ConfigError(f"ExponentialMovingAverage: decay={decay!r}; give a number of at least 0 and below 1")
        self._parameters = [p for p in default_main_program().all_parameters() if not p.stop_gradient]
        self._averages = {
            p.name: create_global_var(p.shape, 0.0, p.dtype, True, name=self._new(f"{p.name}.ema"))
            for p in self._parameters
        }
        self._updates = create_global_var([1], 0, "int64", True, name=self._new("ema_steps"))
        self._decay = create_global_var([1], decay, "float32", True, name=self._new("ema_decay"))
        self._most, self._thres_steps = decay, thres_steps
        with program_guard(self._corrected, Program()), no_grad():
            rest = 1.0 - self._decay ** self._updates.astype("float32")
            self._applied = [average / rest.astype(average.dtype) for average in self._averages.values()]

    def update(self) -> None:
        """Record one update of every average."""
        with no_grad(), of_training():
            assign_variable(self._updates, self._updates + 1)
            if self._thres_steps is not None:
                steps = self._thres_steps.astype("float32").reshape([1])
                assign_variable(self._decay, ((steps + 1) / (steps + 10)).clip(max=self._most))
            for p in self._parameters:
                average, decay = self._averages[p.name], self._decay.astype(p.dtype)
                assign_variable(average, average * decay + p * (1 - decay))


def assign_variable(target: Any, value: Any) -> None:
    """Record that a persistable Variable takes a value."""
    state.write(target, state.read(value))
