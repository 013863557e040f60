"""Checks of dims and indices that ops share, and the host-side step that stands before an op.

A dim out of range is a ShapeError, found from shapes alone. An index out of range is an IndexError in eager
code (2-3 us on the processor; on an accelerator it waits for the index), and in captured code in the checked mode.
Otherwise a read gives NaN (the lowest value for integers) there, and a write is dropped. It never wraps or clamps.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from polyreme.core import spelling, state
from polyreme.core.checked import checked
from polyreme.core.op import OPS
from polyreme.core.state import TensorState
from polyreme.errors import ShapeError
from polyreme.ops.ids import check_within, visible


def dim_of(axis: Any, ndim: int, what: str) -> int:
    """axis counted from the start; raises ShapeError, beginning with `what`, if there is no such dim."""
    if isinstance(axis, tuple) and len(axis) == 1:
        axis = axis[0]
    if isinstance(axis, TensorState):
        axis = state.host(axis, f"{what}, of whose result an axis decides the shape,").item()
    if not isinstance(axis, int) or not -ndim <= axis < ndim:
        raise ShapeError(f"{what}: axis={axis} of a Tensor with {ndim} dims; give one from {-ndim} to {ndim - 1}")
    return axis % ndim


def dims_of(axes: Any, ndim: int, what: str) -> tuple[int, ...]:
    """Each of axes (an int or several) counted from the start; ShapeError if out of range or named twice."""
    dims = tuple(dim_of(a, ndim, what) for a in ints(axes))
    if len(set(dims)) < len(dims):
        raise ShapeError(f"{what}: axis={axes} names a dim twice; name each once")
    return dims


def ints(value: Any) -> tuple[int, ...]:
    """An attribute that is one number or several, as several."""
    return value if isinstance(value, tuple) else (value,)


def preceded(first: Callable[..., Any]) -> Callable[..., Any]:
    """Put a host-side step before an op: first(its arguments) checks them and gives None, or the result itself."""
    code = first.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    # what more there is, the op takes or refuses
    most = None if code.co_flags & inspect.CO_VARARGS else code.co_argcount

    def wrap(public: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = first(*args[:most], **(spelling.renamed(kwargs, names) if kwargs else kwargs))
            return public(*args, **kwargs) if result is None else result

        functools.update_wrapper(run, public)
        OPS[run.__name__] = run
        return run

    return wrap


def at_hand(value: Any) -> np.ndarray | None:
    """The value as an ndarray if reading it stalls nothing: it lies on one processor of the host, outside a capture."""
    if state.capturing():
        return None
    array = value._array if isinstance(value, TensorState) else value
    if isinstance(array, jax.Array):
        if isinstance(array, state.Tracer):
            return None
        devices = array.devices()
        if len(devices) > 1 or next(iter(devices)).platform != "cpu":
            return None
        return np.asarray(array)
    return np.asarray(array) if isinstance(array, (np.ndarray, np.generic, int, float, list, tuple)) else None


def check_index(what: str, index: Any, size: int, dim: int, *, negative: bool = True) -> None:
    """Raise IndexError unless every index is in [-size, size), or [0, size) without negative; ops.ids says when."""
    least = -size if negative else 0

    def describe(wrong: int, at: tuple[int, ...]) -> Exception:
        return IndexError(
            f"{what}: index {wrong} is out of range for dim {dim} of size {size}; give {least} to {size - 1}"
        )

    check_within(index, least, size, describe)


def check_along(what: str, index: Any, x: Any, axis: Any) -> None:
    """check_index for an index along axis of x; a bad axis is left to the op."""
    shape = np.shape(x) if isinstance(x, (list, tuple)) else x.shape
    if isinstance(axis, int) and -len(shape) <= axis < len(shape):
        check_index(what, index, shape[axis], axis % len(shape))


def check_coordinates(what: str, index: Any, shape: Any) -> None:
    """check_index for an index [..., k] whose last dim holds coordinates into the first k dims of shape."""
    if not np.ndim(index) or np.shape(index)[-1] > len(shape):
        return
    values = visible(index)
    if values is None and checked.is_on:
        values = state.read(index) if isinstance(index, TensorState) else index
    if values is not None:
        for dim in range(values.shape[-1]):
            check_index(what, values[..., dim], shape[dim], dim)
