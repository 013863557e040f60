"""Inferencer: a network with saved parameters, run on what is fed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from polyreme.core import unique_name
from polyreme.fluid import io
from polyreme.fluid.executor import Executor
from polyreme.program.current import program_guard
from polyreme.program.program import Program
from polyreme.program.scope import Scope, scope_guard
from polyreme.static.compiled import CompiledProgram


class Inferencer:
    """Runs what infer_func builds and returns, a Variable, with the parameters that Trainer.save_params wrote.

    parallel: split what is fed over all devices.
    """

    def __init__(
        self, infer_func: Callable[[], Any], param_path: str, place: Any = None, parallel: bool = False
    ) -> None:
        self.inference_program, startup = Program(), Program()
        with program_guard(self.inference_program, startup), unique_name.guard():
            self._target = infer_func()
        self.scope, self.exe = Scope(), Executor(place)
        with scope_guard(self.scope):
            self.exe.run(startup)
            io.load_params(self.exe, param_path, self.inference_program)
        program = self.inference_program.clone(for_test=True)
        self._runs: Any = CompiledProgram(program).with_data_parallel() if parallel else program

    def infer(self, inputs: Mapping[str, Any], return_numpy: bool = True) -> list[Any]:
        """What the network gives for inputs, by the names of its data."""
        with scope_guard(self.scope):
            return self.exe.run(self._runs, feed=inputs, fetch_list=[self._target], return_numpy=return_numpy)


__all__ = ["Inferencer"]
