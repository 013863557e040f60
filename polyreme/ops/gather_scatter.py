"""Reading and writing elements at given indices or under a mask.

Floor: 2.  A negative index counts from the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.dtype import promote
from polyreme.core.op import OPS, composite, op
from polyreme.errors import DTypeError, ShapeError
from polyreme.ops.manipulation import dim_of


def _need_integers(what: str, index: Array) -> None:
    if not dtypes.is_integer(index.dtype):
        raise DTypeError(f"{what}: index is {index.dtype.name}, needs int32 or int64; use astype('int64')")


@op
def gather(x: Array, index: Array, axis: int | None = None) -> Array:
    """The slices of x along axis (0 by default) that index names, in its order.

    index [n] or [n, 1] -> a dim of size n in axis's place; a 0-D index takes that dim away.
    """
    _need_integers("gather", index)
    dim = dim_of(0 if axis is None else axis, x.ndim, "gather")
    if index.ndim == 2 and index.shape[1] == 1:
        index = index[:, 0]
    if index.ndim > 1:
        raise ShapeError(
            f"gather: index {list(index.shape)} must be [n], [n, 1] or []; use take_along_axis or gather_nd"
        )
    return jnp.take(x, index, axis=dim)


@composite
def nonzero(x: Any, as_tuple: bool = False, name: str | None = None, out: Any = None) -> Any:
    """Indices of the nonzero elements in row-major order: int64 [n, ndim], or with as_tuple one [n] per dim.

    Reads the host: the number of them is the shape. Raises CaptureError inside a capture.
    """
    value = state.host(x, "nonzero(), whose result has a shape only known on the host")
    found = np.argwhere(value)
    if as_tuple:
        return tuple(OPS["cast"](column, dtypes.int64) for column in found.T)
    return OPS["cast"](found, dtypes.int64, out=out)


def preceded(first: Callable[..., Any]) -> Callable[..., Any]:
    """Put a host-side step before an op: first(its arguments) checks them and gives None, or the result itself."""

    def wrap(public: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = first(*args, **kwargs)
            return public(*args, **kwargs) if result is None else result

        functools.update_wrapper(run, public)
        OPS[run.__name__] = run
        return run

    return wrap


def _condition_alone(condition: Any, x: Any = None, y: Any = None, name: Any = None, out: Any = None) -> Any:
    return nonzero(condition, True) if x is None and y is None else None


@preceded(_condition_alone)
@op
def where(condition: Array, x: Array | None = None, y: Array | None = None) -> Array:
    """x where condition is true (nonzero), y elsewhere; all three broadcast, x and y promote.

    Without x and y: nonzero(condition, as_tuple=True). Raises ShapeError if only one of them is given.
    """
    if x is None or y is None:
        raise ShapeError("where: takes both x and y, or neither; only one was given")
    x, y = promote(x, y)
    return jnp.where(condition.astype(bool), x, y)


@composite
def where_(condition: Any, x: Any, y: Any, name: str | None = None) -> Any:
    """where(condition, x, y) written into x, which is returned."""
    return where(condition, x, y, out=x)
