"""Tensor methods named after dtypes: x.float(), x.long(), x.bfloat16(); and type_as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.ops.arithmetic import cast

CASTS: dict[str, np.dtype] = {
    "bfloat16": dtypes.bfloat16,
    "bool": dtypes.bool_,
    "byte": dtypes.uint8,
    "cdouble": dtypes.complex128,
    "cfloat": dtypes.complex64,
    "char": dtypes.int8,
    "complex64": dtypes.complex64,
    "complex128": dtypes.complex128,
    "double": dtypes.float64,
    "float": dtypes.float32,
    "float16": dtypes.float16,
    "float32": dtypes.float32,
    "float64": dtypes.float64,
    "half": dtypes.float16,
    "int": dtypes.int32,
    "int8": dtypes.int8,
    "int16": dtypes.int16,
    "int32": dtypes.int32,
    "int64": dtypes.int64,
    "long": dtypes.int64,
    "short": dtypes.int16,
    "uint8": dtypes.uint8,
}
"""Method -> the dtype it casts to."""


def _in(x: Any, dtype: np.dtype) -> Any:
    return x if x.dtype == dtype else cast(x, dtype)


def _method(name: str, dtype: np.dtype) -> Callable[[Any], Any]:
    def to(self: Any) -> Any:
        return _in(self, dtype)

    to.__name__ = to.__qualname__ = name
    to.__doc__ = f"The value in {dtype.name}; the Tensor itself if it has that dtype."
    return to


def type_as(self: Any, other: Any) -> Any:
    """The value in other's dtype; the Tensor itself if it has that dtype."""
    return _in(self, other.dtype)


Casts = type(
    "Casts",
    (),
    {
        "__doc__": "A method for every dtype, and type_as.",
        "__slots__": (),
        "type_as": type_as,
        **{name: _method(name, dtype) for name, dtype in CASTS.items()},
    },
)
