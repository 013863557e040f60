"""Functions of the stored elements of sparse Tensors, one by one and of two Tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from polyreme.core.op import OPS
from polyreme.core.state import TensorState
from polyreme.eager.sparse.structure import constant, indices_of, on_host, places_of, union
from polyreme.errors import ShapeError
from polyreme.ops import arithmetic as ar
from polyreme.ops.messages import segment_reduce


def need_sparse(what: str, name: str, x: Any) -> None:
    """Raise TypeError unless x is a sparse Tensor."""
    if not hasattr(x, "with_values"):
        raise TypeError(
            f"{what}: {name} is a {type(x).__name__}, needs a sparse one; to_sparse_coo() or to_sparse_csr() makes it"
        )


# one by one

_UNARY = {
    "abs": "|x|",
    "asin": "arc sine",
    "asinh": "inverse hyperbolic sine",
    "atan": "arc tangent",
    "atanh": "inverse hyperbolic tangent",
    "deg2rad": "x * pi / 180",
    "expm1": "exp(x) - 1",
    "isnan": "whether x is NaN",
    "log1p": "log(1 + x)",
    "neg": "-x",
    "rad2deg": "x * 180 / pi",
    "sin": "sine",
    "sinh": "hyperbolic sine",
    "sqrt": "square root",
    "square": "x * x",
    "tan": "tangent",
    "tanh": "hyperbolic tangent",
}
"""Functions with f(0) = 0, so that the result is stored where the argument is."""


def _of_values(name: str, meaning: str) -> Callable[..., Any]:
    def apply(x: Any, name: str | None = None) -> Any:
        need_sparse(f"sparse.{what}", "x", x)
        return x.with_values(fn(x.values()))

    what, fn = name, OPS[name]
    apply.__name__ = apply.__qualname__ = name
    apply.__doc__ = f"{meaning} of each stored element; where indices repeat, coalesce() first."
    return apply


UNARY = {name: _of_values(name, meaning) for name, meaning in _UNARY.items()}
"""Public functions of one sparse Tensor, by name."""


def pow(x: Any, factor: Any, name: str | None = None) -> Any:
    """Each stored element to the power of factor, a number; where indices repeat, coalesce() first."""
    need_sparse("sparse.pow", "x", x)
    return x.with_values(ar.pow(x.values(), factor))


def cast(x: Any, index_dtype: Any = None, value_dtype: Any = None, name: str | None = None) -> Any:
    """x with its indices and its values in other dtypes."""
    need_sparse("sparse.cast", "x", x)
    return x.converted(index_dtype, value_dtype)


# of two


def _check_pair(what: str, x: Any, y: Any) -> None:
    need_sparse(what, "x", x)
    need_sparse(what, "y", y)
    if type(x) is not type(y):
        raise TypeError(
            f"{what}: {type(x).__name__} with {type(y).__name__}; give two of one format (to_sparse_coo, to_sparse_csr)"
        )
    if x.shape != y.shape or x.sparse_dim() != y.sparse_dim():
        raise ShapeError(
            f"{what}: shapes {list(x.shape)} and {list(y.shape)}, of {x.sparse_dim()} and {y.sparse_dim()} sparse "
            "dims; they must be alike, nothing broadcasts"
        )


def same_places(x: Any, y: Any) -> bool:
    """Whether both hold one and the same Tensors of indices."""
    return all(a is b for a, b in zip(x.where, y.where, strict=True))


def _together(what: str, x: Any, y: Any, everywhere: bool = False) -> tuple[Any, Any, Any, tuple]:
    """Values of x and y at the places where either has an element (or everywhere), and the indices of these."""
    shape = x.dims[: x.sparse_dim()]
    a, b = (places_of(on_host(each, what), shape) for each in (x, y))
    places, at, bt = (np.arange(math.prod(shape)), a, b) if everywhere else union(a, b)
    of_x, of_y = (segment_reduce(v.values(), i, len(places)) for v, i in ((x, at), (y, bt)))
    return (of_x, of_y, constant(indices_of(places, shape, x.index_dtype)), shape)


def _combine(what: str, fn: Callable[..., Any], x: Any, y: Any, at_once: bool, everywhere: bool = False) -> Any:
    _check_pair(what, x, y)
    if at_once and same_places(x, y):
        return x.with_values(fn(x.values(), y.values()))
    left, right, indices, _ = _together(what, x, y, everywhere)
    return x.from_coo(indices, fn(left, right), x.dims)


def _is_number(y: Any) -> bool:
    return isinstance(y, (bool, int, float, complex, np.generic)) or (isinstance(y, TensorState) and y._array.ndim == 0)


def add(x: Any, y: Any, name: str | None = None) -> Any:
    """x + y of two sparse Tensors of one format and shape; the result stores what either stores.

    Reads indices on the host, unless both hold the same ones.
    """
    return _combine("sparse.add", ar.add, x, y, True)


def subtract(x: Any, y: Any, name: str | None = None) -> Any:
    """x - y of two sparse Tensors of one format and shape; the result stores what either stores.

    Reads indices on the host, unless both hold the same ones.
    """
    return _combine("sparse.subtract", ar.subtract, x, y, True)


def multiply(x: Any, y: Any, name: str | None = None) -> Any:
    """x * y of two sparse Tensors of one format and shape, or of one and a number; stores what either stores.

    Reads indices on the host, unless both hold the same, coalesced ones.
    """
    if _is_number(y):
        need_sparse("sparse.multiply", "x", x)
        return x.with_values(ar.multiply(x.values(), y))
    return _combine("sparse.multiply", ar.multiply, x, y, getattr(x, "coalesced", True))


def divide(x: Any, y: Any, name: str | None = None) -> Any:
    """x / y of two sparse Tensors of one format and shape, or of one and a number.

    Of two Tensors every element is stored: where neither has one it is 0 / 0. Reads indices on the host.
    """
    if _is_number(y):
        need_sparse("sparse.divide", "x", x)
        return x.with_values(ar.divide(x.values(), y))
    return _combine("sparse.divide", ar.divide, x, y, False, everywhere=True)
