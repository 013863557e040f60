"""Traced: the ops of one forward of an imperative model, recorded without running it.

The model runs once as it is written, on arrays that have a shape and a dtype but no values; every op that it
calls is noted with what it read and made, its attributes, and the Layer it was called in. Nothing is computed, no
parameter is changed, no random number drawn.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from polyreme.core import amp_policy, layout, mode, rng, state
from polyreme.core import dtype as dtypes
from polyreme.core.op import ATTR, KEY, TENSORS, Op
from polyreme.core.state import TensorState
from polyreme.eager import tape
from polyreme.eager.dispatch import constant
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ConfigError, GradError, HostValueError
from polyreme.jit.capture import Capture, watching
from polyreme.jit.convert import converted
from polyreme.jit.structure import tensors_in
from polyreme.nn.layer import Layer

BATCH = 4
"""Samples that stand for a batch whose size is left open."""

Source = Literal["input", "label", "parameter", "buffer", "constant", "op"]


@dataclass(frozen=True, eq=False, slots=True)
class TracedValue:
    """An array that the model reads or makes: where it is from, and its name if it has one (that of a parameter or
    buffer is dotted). Two are the same only if they are one object."""

    source: Source
    shape: tuple[int, ...]
    dtype: np.dtype
    name: str = ""

    def __repr__(self) -> str:
        return f"{self.name or self.source} {self.dtype.name}{list(self.shape)}"

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


_RANDOM_KEY = TracedValue("constant", (2,), np.dtype("uint32"), "random key")


@dataclass(eq=False, slots=True)
class TracedOp:
    """One call of an op.

    op: its declaration. inputs: what it read, in the order its kernel takes arrays. names: the op's parameter that each
    input was given for. attributes: its other parameters. path: dotted name of the Layer it was called in, "" for the
    model itself, "loss" for the loss. call: index in Traced.calls of the innermost
    Layer call, -1 outside any. fn: the pure function arrays -> outputs, attributes and casts included.
    """

    op: Op
    inputs: tuple[TracedValue, ...]
    names: tuple[str, ...]
    attributes: dict[str, Any]
    outputs: tuple[TracedValue, ...]
    path: str
    call: int
    fn: Callable[..., Any]
    key: Any
    """Equal for two calls that compute the same function."""

    @property
    def name(self) -> str:
        """The op's."""
        return self.op.name

    def input_of(self, name: str) -> TracedValue | None:
        """The input given for one of the op's parameters; None if there was none."""
        return next((v for v, n in zip(self.inputs, self.names, strict=True) if n == name), None)

    def jaxpr(self) -> Any:
        """The function of the op as a closed jaxpr."""
        return jax.make_jaxpr(self.fn)(*[jax.ShapeDtypeStruct(v.shape, v.dtype) for v in self.inputs])

    def __repr__(self) -> str:
        return f"{self.path or '.'}: {self.name}({', '.join(map(repr, self.inputs))}) -> {list(self.outputs)}"


@dataclass(eq=False, slots=True)
class LayerCall:
    """One call of a Layer: its dotted name, the Layer, the call around it (index in Traced.calls; -1 for none), the ops
    made inside it (first up to, not including, last, in Traced.ops), and the values it took and gave.
    """

    path: str
    layer: Layer
    outer: int
    first: int
    inputs: tuple[TracedValue, ...]
    last: int = 0
    outputs: tuple[TracedValue, ...] = ()


@dataclass(eq=False)
class Traced:
    """A model's forward (and loss): ops in the order they were called, calls of Layers, and the values at its ends.

    parameters, buffers: by dotted name; one that several names hold has the first. aliases: other name -> the first.
    outputs: what the model gave. loss: what the loss gave, None without one. batch: samples of the inputs.
    """

    model: Layer
    ops: list[TracedOp] = field(default_factory=list)
    calls: list[LayerCall] = field(default_factory=list)
    inputs: tuple[TracedValue, ...] = ()
    labels: tuple[TracedValue, ...] = ()
    parameters: dict[str, TracedValue] = field(default_factory=dict)
    buffers: dict[str, TracedValue] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    outputs: tuple[TracedValue, ...] = ()
    loss: TracedValue | None = None
    batch: int = 1

    def uses(self) -> dict[TracedValue, list[TracedOp]]:
        """Value -> the ops that read it, in order."""
        found: dict[TracedValue, list[TracedOp]] = {}
        for op in self.ops:
            for value in dict.fromkeys(op.inputs):
                found.setdefault(value, []).append(op)
        return found

    def ops_in(self, call: LayerCall) -> list[TracedOp]:
        """The ops called inside a call of a Layer, those of its sublayers included."""
        return self.ops[call.first : call.last]


def trace(
    model: Layer,
    inputs: Sequence[Any],
    labels: Sequence[Any] = (),
    loss: Callable[..., Any] | None = None,
    batch: int = BATCH,
) -> Traced:
    """Record one forward of model on inputs, and of loss on its outputs and labels.

    inputs, labels: InputSpecs, Tensors or arrays, of which only shape and dtype are read; None or -1 in a shape is an
    open batch, for which `batch` stands. loss: called as loss(*outputs, *labels); without it the model is given the
    labels too. The model runs in the mode it is in (train or eval), under the autocast in force, off any mesh.

    What comes out of control flow on Tensors is a value that no op made. Raises CaptureError if the model reads the
    value of a Tensor, or asks for gradients, ConfigError for an input without shape or dtype. What the model raises
    comes through.

    >>> from polyreme.nn.layers.linear import Linear
    >>> trace(Linear(3, 5), [np.zeros((2, 3), "float32")]).ops
    [.: linear(input float32[2, 3], weight float32[3, 5], bias float32[5]) -> [op float32[2, 5]]]
    """
    arguments = [*(abstract(x, batch) for x in inputs), *(abstract(y, batch) for y in labels)]
    rows = next((x.shape[0] for x in arguments if x.shape), 1)
    try:
        return _Tracing(model, arguments, len(inputs), loss, rows).record(_as_written)
    except GradError as error:
        raise CaptureError(
            f"{type(model).__name__} asks for gradients while it is traced ({error}), when there are none; "
            "take hooks and gradients out of its forward, or mark it by hand"
        ) from error
    except HostValueError:
        try:
            return _Tracing(model, arguments, len(inputs), loss, rows).record(converted)
        except HostValueError as error:
            what = str(error).partition(" needs the value on the host")[0]
            raise CaptureError(
                f"{what} needs the value of a Tensor, which tracing does not have; use ops whose result has a "
                "shape that does not depend on values (where, masked_fill), or give its dims by hand and a plan"
            ) from error


def abstract(spec: Any, batch: int = BATCH) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an InputSpec, Tensor or array. Raises ConfigError for a value without them."""
    shape, dtype = getattr(spec, "shape", None), getattr(spec, "dtype", None)
    if shape is None or dtype is None:
        raise ConfigError(f"trace: {spec!r} has no shape and dtype; give InputSpec(shape, dtype), a Tensor or an array")
    sizes = tuple(batch if n is None or n == -1 else int(n) for n in shape)
    return jax.ShapeDtypeStruct(sizes, dtypes.as_dtype(dtype))


def _as_written(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


class _Watching(Capture):
    """The capture that a trace runs in: it learns of each Layer's call."""

    def __init__(self, tracing: _Tracing, convert: Callable[..., Any]) -> None:
        super().__init__(converted=convert)
        self.tracing = tracing

    def entered(self, layer: Any) -> Callable[..., Any]:
        forward = super().entered(layer)
        self.tracing.enter(layer)

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.tracing.record_arguments(args, kwargs)
            return self.tracing.record_results(forward(*args, **kwargs))

        return run

    def copied(self, tensor: TensorState, made: TensorState) -> None:
        self.tracing.copied(tensor, made)

    def left(self) -> None:
        super().left()
        self.tracing.leave()


class _Tracing:
    """One run: a mode that notes each op and hands it on to the mode in force."""

    def __init__(self, model: Layer, given: list[Any], num_inputs: int, loss: Any, rows: int) -> None:
        self.inputs, self.num_inputs, self.loss = given, num_inputs, loss
        self.traced = Traced(model, batch=rows)
        self.paths = {id(layer): path for path, layer in model.named_sublayers(include_self=True)}
        self.under = mode.current.mode
        self.open: list[int] = []
        # by the array's id, with the array, which must live as long as its id is looked up
        self.values: dict[int, tuple[Any, TracedValue]] = {}

    def record(self, convert: Callable[..., Any]) -> Traced:
        """Run the model once."""
        model = self.traced.model
        named = dict(model.named_parameters())
        # running statistics cost what buffers do: no gradient, no state of an optimizer, and no plan splits them
        parameters = {name: p for name, p in named.items() if not p.is_statistic}
        buffers = {name: p for name, p in named.items() if p.is_statistic} | dict(model.named_buffers())
        self.traced.aliases = _aliases(model, parameters)
        tensors = [*parameters.values(), *buffers.values()]
        free = [jax.ShapeDtypeStruct(tuple(t._array.shape), t._array.dtype) for t in tensors]

        def stage(arrays: list[Any], arguments: list[Any]) -> None:
            with watching(_Watching(self, convert)) as watch, tape.GradEnabled(False), mode.using(self):
                for tensor, array in zip(tensors, arrays, strict=True):
                    watch.write(tensor, array)
                self._name(arrays[: len(parameters)], parameters, "parameter", self.traced.parameters)
                self._name(arrays[len(parameters) :], buffers, "buffer", self.traced.buffers)
                self._forward(arguments)

        drawn = rng.default_generator.drawn
        try:
            with layout.using(None):
                jax.eval_shape(stage, free, self.inputs)
        finally:
            rng.default_generator.drawn = drawn
            self.values.clear()
        return self.traced

    def _name(self, arrays: Sequence[Any], names: Any, source: Source, into: dict[str, TracedValue]) -> None:
        for array, name in zip(arrays, names, strict=True):
            into[name] = self._new(array, source, name)

    def _forward(self, arrays: list[Any]) -> None:
        traced, n = self.traced, self.num_inputs
        traced.inputs = tuple(self._new(a, "input", f"input{i}" if i else "input") for i, a in enumerate(arrays[:n]))
        traced.labels = tuple(self._new(a, "label", f"label{i}" if i else "label") for i, a in enumerate(arrays[n:]))
        inputs, labels = [Tensor(a) for a in arrays[:n]], [Tensor(a) for a in arrays[n:]]
        result = traced.model(*inputs, *([] if self.loss is not None else labels))
        traced.outputs = self._values_of(result)
        if self.loss is not None:
            outputs = list(result) if isinstance(result, (tuple, list)) else [result]
            found = self._values_of(self.loss(*outputs, *labels))
            if not found:
                raise ConfigError("trace: the loss gave no Tensor; return the loss from it")
            traced.loss = found[0]
        elif labels and traced.outputs:
            traced.loss = traced.outputs[0]

    # Layers

    def enter(self, layer: Layer) -> None:
        """A Layer's call begins; one that the model does not hold goes by the name of the call around it."""
        outer = self.open[-1] if self.open else -1
        path = self.paths.get(id(layer), self._here())
        self.open.append(len(self.traced.calls))
        self.traced.calls.append(LayerCall(path, layer, outer, len(self.traced.ops), ()))

    def _here(self) -> str:
        """Dotted name of the innermost Layer; what is called after the model is the loss."""
        return self.traced.calls[self.open[-1]].path if self.open else "loss"

    def record_arguments(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Record the arguments of the innermost Layer's forward."""
        self.traced.calls[self.open[-1]].inputs = self._values_of((args, kwargs))

    def record_results(self, result: Any) -> Any:
        """Record the results of the innermost Layer's forward."""
        self.traced.calls[self.open[-1]].outputs = self._values_of(result)
        return result

    def leave(self) -> None:
        """The innermost Layer's call ends."""
        self.traced.calls[self.open.pop()].last = len(self.traced.ops)

    def copied(self, tensor: TensorState, made: TensorState) -> None:
        """A copy stands for the same value."""
        self.values[id(made._array)] = (made._array, self._value(tensor._array))

    # ops

    def run(self, op: Op, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Hand the call on, and note it."""
        given = {k: v for k, v in kwargs.items() if k not in ("name", "out")}
        full = op.bind(args, given)
        inputs, names, attributes, template = self._taken(op, full)
        policy = amp_policy.active.policy
        kernel = op.kernel(template, policy)
        result = self.under.run(op, args, dict(kwargs))
        outer = self.open[-1] if self.open else -1
        self.traced.ops.append(
            TracedOp(
                op, inputs, names, attributes, tuple(self._op_value(t._array) for t in tensors_in(result)),
                self._here(), outer, kernel.fn,
                (op.name, repr(template), policy, tuple((v.shape, v.dtype) for v in inputs)),
            )
        )  # fmt: skip
        return result

    def _taken(self, op: Op, full: Sequence[Any]) -> tuple[tuple, tuple, dict[str, Any], tuple]:
        """(inputs, the op's parameter of each, attributes, the kernel's template) of a call."""
        inputs: list[TracedValue] = []
        names: list[str] = []
        attributes: dict[str, Any] = {}
        template: list[Any] = []
        for name, kind, value in zip(op.names, op.kinds, full, strict=True):
            if kind is ATTR:
                attributes[name] = value
                template.append((op.attribute(op.index[name], value),))
            elif kind is TENSORS:
                inputs += [self._read(v) for v in value]
                names += [name] * len(value)
                template.append(len(value))
            elif kind is KEY:
                inputs.append(_RANDOM_KEY if value is None or value is inspect.Parameter.empty else self._read(value))
                names.append(name)
                template.append(-1)
            elif value is None:
                template.append((None,))
            else:
                inputs.append(self._read(value))
                names.append(name)
                template.append(-1)
        return tuple(inputs), tuple(names), attributes, tuple(template)

    # values

    def _read(self, value: Any) -> TracedValue:
        if isinstance(value, TensorState):
            return self._value(state.read(value))
        return self._value(constant(value))

    def _value(self, array: Any) -> TracedValue:
        """The traced value of an array. An array that no op made is a constant, or, if it depends on something traced,
        the result of a branch or loop, which counts as an unknown op."""
        found = self.values.get(id(array))
        if found is None:
            return self._new(array, "op" if isinstance(array, state.Tracer) else "constant")
        return found[1]

    def _op_value(self, array: Any) -> TracedValue:
        return self._new(array, "op")

    def _new(self, array: Any, source: Source, name: str = "") -> TracedValue:
        made = TracedValue(source, tuple(array.shape), np.dtype(array.dtype), name)
        self.values[id(array)] = (array, made)
        return made

    def _values_of(self, value: Any) -> tuple[TracedValue, ...]:
        return tuple(self._value(t._array) for t in tensors_in(value))


def _aliases(model: Layer, parameters: dict[str, Any]) -> dict[str, str]:
    """Other names of parameters that are held more than once -> the first."""
    first = {id(p): name for name, p in parameters.items()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first.get(id(p), name) != name}
