"""Dygraph code as Programs: TracedLayer, declarative and its switch."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyreme.core import state, unique_name
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError
from polyreme.export import save as artefacts
from polyreme.export import translated_layer
from polyreme.fluid import io
from polyreme.fluid.executor import Executor
from polyreme.jit.to_static import StaticFunction, enable_to_static, to_static
from polyreme.program.current import program_guard
from polyreme.program.mode import data
from polyreme.program.program import Program
from polyreme.program.recorder import Recorder
from polyreme.static.compiled import CompiledProgram


class TracedLayer:
    """A Layer's forward recorded as a Program, which is run, or saved for inference; made by trace().

    parameters: the Tensors with values that the Program holds. feed_names, fetch_names: its inputs and outputs.
    """

    def __init__(
        self, program: Program, parameters: Sequence[Any], feed_names: Sequence[str], fetch_names: Sequence[str]
    ) -> None:
        self._program, self._parameters = program, list(parameters)
        self._feed_names, self._fetch_names = list(feed_names), list(fetch_names)
        self._runs: Any = program
        self._executor = Executor()

    @property
    def program(self) -> Program:
        """What was recorded."""
        return self._program

    @staticmethod
    def trace(layer: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Any, TracedLayer]:
        """(what layer gives for inputs, the TracedLayer). inputs: Tensors; another batch, dim 0, may be fed later."""
        values = [_tensor(x) for x in inputs]
        outputs = layer(*values)
        program, feeds, fetches = _record(layer, values)
        parameters = list(program.captured.values())
        return outputs, TracedLayer(program, parameters, [f.name for f in feeds], [f.name for f in fetches])

    def __call__(self, inputs: Sequence[Any]) -> list[Tensor]:
        """The outputs, Tensors, for other inputs, with the values that the parameters have now."""
        if len(inputs) != len(self._feed_names):
            raise ConfigError(f"TracedLayer: {len(inputs)} inputs given, it was traced with {len(self._feed_names)}")
        feed = {name: np.asarray(_tensor(x).numpy()) for name, x in zip(self._feed_names, inputs, strict=True)}
        values = self._executor.run(self._runs, feed=feed, fetch_list=self._fetch_names)
        return [to_tensor(value) for value in values]

    def set_strategy(self, build_strategy: Any = None, exec_strategy: Any = None) -> None:
        """How the Program is run, before the first run: see CompiledProgram.with_data_parallel, here of one device."""
        self._runs = CompiledProgram(self._program, build_strategy=build_strategy)

    def save_inference_model(
        self, dirname: str | os.PathLike[str], feed: Sequence[int] | None = None, fetch: Sequence[int] | None = None
    ) -> None:
        """fluid.io.save_inference_model of it. feed, fetch: which inputs and outputs, by number; all if None."""
        feeds, fetches = _chosen("feed", self._feed_names, feed), _chosen("fetch", self._fetch_names, fetch)
        targets = [self._program.global_block().var(name) for name in fetches]
        io.save_inference_model(dirname, feeds, targets, self._executor, self._program)


def _record(function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Program, list[Any], list[Any]]:
    """(Program, its inputs, its outputs) of a function called with Variables like these Tensors."""
    program, outer = Program(), state.watch.active
    with program_guard(program, Program()), unique_name.guard():
        state.watch.active = Recorder()
        try:
            feeds = [data(f"feed_{i}", [None, *x.shape[1:]] if x.shape else [], x.dtype) for i, x in enumerate(inputs)]
            outputs = function(*feeds)
        finally:
            state.watch.active = outer
    return program, feeds, list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else to_tensor(np.asarray(value))


def _chosen(what: str, names: list[str], numbers: Sequence[int] | None) -> list[str]:
    if numbers is None:
        return names
    if not all(isinstance(n, int) and 0 <= n < len(names) for n in numbers):
        raise ConfigError(f"TracedLayer.save_inference_model: {what}={numbers!r}; give numbers below {len(names)}")
    return [names[n] for n in numbers]


def declarative(function: Any) -> Any:
    """to_static: run a function, with its control flow on Tensors, as one compiled program."""
    return to_static(function)


dygraph_to_static_output = dygraph_to_static_func = declarative
save, load = artefacts.save, translated_layer.load  # jit.save and jit.load of 1.8


class ProgramTranslator:
    """The switch of declarative, and what it makes of a function; there is one."""

    _the_one: ProgramTranslator | None = None

    def __new__(cls) -> ProgramTranslator:
        if cls._the_one is None:
            cls._the_one = super().__new__(cls)
        return cls._the_one

    @classmethod
    def get_instance(cls) -> ProgramTranslator:
        """The one there is."""
        return cls()

    def enable(self, enable_declarative: bool) -> None:
        """Whether what declarative decorates is captured; if not, it runs as it is written."""
        enable_to_static(enable_declarative)

    def get_output(self, dygraph_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the captured function gives."""
        return to_static(dygraph_func)(*args, **kwargs)

    def get_func(self, dygraph_func: Callable[..., Any]) -> Callable[..., Any]:
        """The captured function."""
        return to_static(dygraph_func)

    def get_program(
        self, dygraph_func: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[Program, Program, list[Any], list[Any]]:
        """(main Program, startup Program, inputs, outputs) of it with arguments like these Tensors or ndarrays.

        Raises ConfigError for keyword arguments. The startup Program is empty: parameters have their values.
        """
        if kwargs:
            raise ConfigError(f"ProgramTranslator.get_program: give {', '.join(kwargs)} by position")
        program, feeds, fetches = _record(dygraph_func, [_tensor(x) for x in args])
        return program, Program(), feeds, fetches

    def get_code(self, dygraph_func: Callable[..., Any]) -> str:
        """The source of the function, which is what is captured."""
        inner = dygraph_func.dygraph_function if isinstance(dygraph_func, StaticFunction) else dygraph_func
        return inspect.getsource(inner)


__all__ = [
    "ProgramTranslator", "TracedLayer", "declarative", "dygraph_to_static_func", "dygraph_to_static_output",
]  # fmt: skip
