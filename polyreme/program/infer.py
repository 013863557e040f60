"""Shapes and dtypes of what operations give, found by running them on abstract Tensors.

Where a size is not known the run is made twice, with two sizes in its place: what differs is not known.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from polyreme.core.state import TensorState, Tracer
from polyreme.core.symbol import DYNAMIC, PROBES, Symbol
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ConfigError, DTypeError, GradError, HostValueError, ProgramError, ShapeError
from polyreme.jit.capture import Capture, watching
from polyreme.program import values
from polyreme.program.operation import Call, call, is_folded
from polyreme.program.scope import Scope

_STAND_INS = "|".join(rf"\b{probe}\b" for probe in PROBES)
_OURS = (ShapeError, DTypeError, ConfigError, CaptureError, GradError, IndexError, TypeError, ValueError)


@dataclass
class InferredTensor:
    """A Tensor that an operation gave while shapes were inferred."""

    array: Any
    stop_gradient: bool

    @classmethod
    def of(cls, tensor: TensorState) -> InferredTensor:
        """What there is to know of a Tensor."""
        return cls(tensor._array, tensor.stop_gradient)


def call_results(recorded: Call, by_name: dict[str, TensorState]) -> tuple[list[Any], list[str]]:
    """(what the call gives for each probe size, persistable values it changes)."""
    changed: list[str] = []

    def run(given: dict[str, Tensor]) -> Any:
        args, kwargs = values.resolve((recorded.args, recorded.kwargs), given.__getitem__)
        result = call(recorded.name, args, kwargs)
        changed[:] = [n for n, t in given.items() if t._array is not starts[n]]
        return values.replace(result, TensorState, InferredTensor.of)

    starts: dict[str, Any] = {}
    with tape.GradEnabled(recorded.taped):
        return probed(by_name, run, starts), changed


def probed(
    by_name: dict[str, TensorState], run: Callable[[dict[str, Tensor]], Any], starts: dict[str, Any]
) -> list[Any]:
    """run's result on abstract Tensors, for each probe size if a size or value depends on it."""
    symbols = [t._array for t in by_name.values() if isinstance(t._array, Symbol)]
    probes = PROBES if any(s.is_dynamic or s.known is not None for s in symbols) else PROBES[:1]
    return [_abstractly(by_name, run, starts, probe) for probe in probes]


def _abstractly(by_name: dict[str, TensorState], run: Callable, starts: dict[str, Any], probe: int) -> Any:
    avals = {n: t._array.at(probe) if isinstance(t._array, Symbol) else _abstract(t._array) for n, t in by_name.items()}
    free = {n: a for n, a in avals.items() if isinstance(a, jax.ShapeDtypeStruct)}
    results: list[Any] = []

    def stage(arrays: dict[str, Any]) -> None:
        with watching(Capture()):
            starts.update({n: arrays.get(n, a) for n, a in avals.items()})
            given = {n: _like(by_name[n], array) for n, array in starts.items()}
            results.append(run(given))

    try:
        jax.eval_shape(stage, free)
    except HostValueError as error:
        what = str(error).partition(" needs the value on the host")[0]
        raise CaptureError(
            f"{what} needs the value, and a static Program has none while it is recorded; use an op whose result has a "
            "shape that does not depend on values (where, masked_fill), or compute it outside and feed it"
        ) from error
    except _OURS as error:
        shown = re.sub(_STAND_INS, "-1", str(error))
        if shown == str(error):
            raise
        raise type(error)(shown) from error
    return results[0]


def _abstract(array: Any) -> Any:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=getattr(array, "weak_type", False))


def _like(tensor: TensorState, array: Any) -> Tensor:
    if not isinstance(array, (jax.Array, Tracer)):
        array = np.asarray(array)
    made = Tensor.__new__(Tensor)
    TensorState.__init__(made, array, tensor.stop_gradient)
    return made


def shape_of(first: Any, other: Any) -> tuple[int, ...]:
    """The shape of a result from what it was under each probe."""
    if len(first.shape) != len(other.shape):
        raise ProgramError(
            f"a result has {len(first.shape)} or {len(other.shape)} dims, depending on a size that is not known while "
            "recording; give that size in static.data"
        )
    return tuple(a if a == b else DYNAMIC for a, b in zip(first.shape, other.shape, strict=True))


def known_of(first: Any, other: Any) -> tuple[Any, Any] | None:
    """The values of a result under each probe, where they follow from shapes."""
    if is_folded(first) and is_folded(other):
        return np.asarray(first), np.asarray(other)
    return None


def scope_of(given: dict[str, Tensor]) -> Scope:
    """A scope that holds these Tensors, for operations that look persistable values up."""
    scope = Scope()
    for name, tensor in given.items():
        scope.adopt(name, tensor)
    return scope
