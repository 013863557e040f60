"""Predictor: runs an artefact through named handles or lists; clones share its weights and compiled programs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from polyreme.core import state
from polyreme.core.devices.transfer import aligned_copy
from polyreme.core.state import TensorState
from polyreme.eager.tensor import Tensor as EagerTensor
from polyreme.errors import ConfigError, DataError, DTypeError, ShapeError, did_you_mean
from polyreme.export.spec import ArraySpec
from polyreme.inference.config import Config
from polyreme.inference.engine import ArtifactEngine
from polyreme.inference.kinds import DataType

_SMALL = 1 << 16  # bytes


class Tensor:
    """A handle: one input or output of a predictor, under its name."""

    def __init__(self, spec: ArraySpec, engine: ArtifactEngine, is_input: bool) -> None:
        self._spec = spec
        self._engine = engine
        self._is_input = is_input
        self.array: Any = None

    def name(self) -> str:
        """The name of the input or output."""
        return self._spec.name

    def copy_from_cpu(self, data: np.ndarray) -> None:
        """Take a copy of an ndarray, which the caller may change afterwards. Raises DTypeError for another dtype."""
        self._check(data, (np.ndarray,))
        # jax copies what is not aligned once more, which costs less than aligning while it is small
        self.array = data.copy() if data.nbytes < _SMALL else aligned_copy(data)

    def share_external_data(self, data: Any) -> None:
        """Take a Tensor, jax array or ndarray as it is, uncopied; an ndarray may not change until run() is over."""
        array = state.read(data) if isinstance(data, TensorState) else data
        self._check(array, (np.ndarray, jax.Array))
        self.array = self._engine.place(array) if isinstance(array, jax.Array) else array

    def copy_to_cpu(self) -> np.ndarray:
        """The value as an ndarray of its own; waits for the run that makes it. Raises DataError before the first."""
        return np.array(self._value())

    def to_tensor(self) -> EagerTensor:
        """The value as a Tensor, without a copy; raises DataError before the first run."""
        return EagerTensor(jax.numpy.asarray(self._value()))

    def reshape(self, shape: Sequence[int]) -> None:
        """Give the value another shape of as many elements. Without a value this checks the shape only: what is copied
        in brings its own.
        """
        sizes = tuple(int(n) for n in shape)
        want = self._spec.shape
        if len(sizes) != len(want) or any(w is not None and w != n for w, n in zip(want, sizes, strict=True)):
            raise ShapeError(f"reshape({list(sizes)}): {self._spec} does not take this shape")
        if self.array is not None and self.array.size == np.prod(sizes):
            self.array = self.array.reshape(sizes)

    def shape(self) -> list[int]:
        """Sizes of the value; before there is one, of what is declared, -1 where it is open."""
        if self.array is not None:
            return list(self.array.shape)
        return [-1 if n is None else n for n in self._spec.shape]

    def type(self) -> DataType:
        """Its dtype."""
        return DataType.of(self._spec.dtype)

    def lod(self) -> list[list[int]]:
        """[]: there are no sequences of unequal length inside a Tensor here."""
        return []

    def set_lod(self, lod: Sequence[Sequence[int]]) -> None:
        """Accepts [] only."""
        if lod:
            raise ConfigError(f"set_lod({lod!r}): programs take whole arrays; pad sequences and pass their lengths")

    def _value(self) -> Any:
        if self.array is None:
            todo = "copy_from_cpu it first" if self._is_input else "call run() first"
            raise DataError(f"{self._spec.name!r} has no value yet; {todo}")
        return self.array

    def _check(self, array: Any, kinds: tuple[type, ...]) -> None:
        if not self._is_input:
            raise ConfigError(f"{self._spec.name!r} is an output; values go into the handles of inputs")
        if not isinstance(array, kinds):
            raise TypeError(f"input {self._spec.name!r} takes an ndarray, got {type(array).__name__}")
        if array.dtype != self._spec.dtype:
            raise DTypeError(
                f"input {self._spec.name!r} is {self._spec.dtype.name}, got {array.dtype}; convert it with astype"
            )


class Predictor:
    """Runs a saved model. Made by create_predictor; clone() gives one for another thread.

    >>> import tempfile
    >>> import numpy as np
    >>> from polyreme import jit
    >>> from polyreme.inference import Config, create_predictor
    >>> from polyreme.hapi import InputSpec
    >>> from polyreme.nn import ReLU
    >>> path = tempfile.mkdtemp() + "/relu"
    >>> jit.save(ReLU(), path, [InputSpec([None, 2], "float32", "x")])
    >>> predictor = create_predictor(Config(path))
    >>> predictor.get_input_handle("x").copy_from_cpu(np.float32([[-1, 2]]))
    >>> predictor.run()
    True
    >>> predictor.get_output_handle("output_0").copy_to_cpu().tolist()
    [[0.0, 2.0]]
    """

    def __init__(self, engine: ArtifactEngine) -> None:
        self._engine = engine
        self._inputs = {s.name: Tensor(s, engine, True) for s in engine.function.inputs}
        self._outputs = {s.name: Tensor(s, engine, False) for s in engine.function.outputs}
        self._input_handles = list(self._inputs.values())
        self._output_handles = list(self._outputs.values())

    def get_input_names(self) -> list[str]:
        """Names of the inputs, in order."""
        return list(self._inputs)

    def get_output_names(self) -> list[str]:
        """Names of the outputs, in order."""
        return list(self._outputs)

    def get_input_handle(self, name: str) -> Tensor:
        """The handle of an input; ConfigError for a name that is none."""
        return _name(self._inputs, name, "input")

    def get_output_handle(self, name: str) -> Tensor:
        """The handle of an output; ConfigError for a name that is none."""
        return _name(self._outputs, name, "output")

    def run(self, inputs: Sequence[Any] | None = None) -> Any:
        """Without arguments: from the input handles to the output handles; returns True. With a list of Tensors or
        arrays, in the order of the inputs: the outputs as a list of Tensors.

        Raises DataError for an input handle without a value, ShapeError and DTypeError for values that do not fit.
        """
        if inputs is not None:
            return [EagerTensor(out) for out in self._engine.run([self._array(x) for x in inputs])]
        arrays = [handle.array for handle in self._input_handles]
        if any(array is None for array in arrays):
            raise self._missing()
        for handle, out in zip(self._output_handles, self._engine.run(arrays), strict=True):
            handle.array = out
        return True

    def clone(self, stream: Any = None) -> Predictor:
        """A predictor with handles of its own over the same weights and compiled programs, for another thread."""
        if stream is not None:
            raise ConfigError(f"Predictor.clone: stream={stream!r}: XLA has its own streams; leave it out")
        return Predictor(self._engine)

    def warm_up(self, shapes: Sequence[Mapping[str, Sequence[int]]] | None = None) -> int:
        """Compile ahead: for every batch bucket (batch 1 without buckets), or for these shapes, each {input: shape}.

        Returns how many sets of shapes are compiled now. Raises ConfigError where another open dim needs a size.
        """
        return self._engine.warm_up(shapes)

    def clear_intermediate_tensor(self) -> None:
        """Let go of the values in the handles."""
        for handle in (*self._input_handles, *self._output_handles):
            handle.array = None

    def try_shrink_memory(self) -> int:
        """clear_intermediate_tensor, and what else can be collected; returns the bytes that the handles held."""
        held = sum(h.array.nbytes for h in (*self._input_handles, *self._output_handles) if h.array is not None)
        self.clear_intermediate_tensor()
        gc.collect()
        return held

    def register_input_hook(self, hook: Callable[..., Any]) -> None:
        """Refused with ConfigError: a compiled program has no ops to watch."""
        raise ConfigError("register_input_hook: a compiled program has no ops to watch; run the Layer eagerly for that")

    def register_output_hook(self, hook: Callable[..., Any]) -> None:
        """Refused with ConfigError: a compiled program has no ops to watch."""
        raise ConfigError(
            "register_output_hook: a compiled program has no ops to watch; run the Layer eagerly for that"
        )

    def _array(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value
        array = state.read(value) if isinstance(value, TensorState) else value
        if not isinstance(array, jax.Array):
            raise TypeError(f"run takes Tensors and arrays, got {type(value).__name__}")
        return self._engine.place(array)

    def _missing(self) -> DataError:
        missing = [h.name() for h in self._input_handles if h.array is None]
        return DataError(f"run: no value for input {', '.join(missing)}; copy_from_cpu into its handle first")


def _name(handles: Mapping[str, Tensor], name: str, what: str) -> Tensor:
    if name not in handles:
        raise ConfigError(f"there is no {what} {name!r}{did_you_mean(name, handles)}")
    return handles[name]


def create_predictor(config: Config) -> Predictor:
    """Reads the artefact and puts its weights on the device.

    Raises CheckpointError for files that are missing or changed, DeviceError for a device that is not there or that the
    artefact was not exported for.
    """
    return Predictor(ArtifactEngine(config))


class PredictorPool:
    """Predictors over one set of weights, one a thread."""

    def __init__(self, config: Config, size: int = 1) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"PredictorPool: size={size!r}; give a whole number from 1")
        first = create_predictor(config)
        self._predictors = [first, *(first.clone() for _ in range(size - 1))]

    def retrieve(self, index: int) -> Predictor:
        """The predictor at an index; raises IndexError out of range."""
        if not 0 <= index < len(self._predictors):
            raise IndexError(f"PredictorPool.retrieve({index}): there are {len(self._predictors)}, from 0")
        return self._predictors[index]
