"""Reductions over dims.

Floor: 2.  axis is None (all dims), an int or a list of ints, negative from the end; keepdim leaves size-1 dims.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core.op import op


@op
def sum(x: Array, axis: Any = None, dtype: Any = None, keepdim: bool = False) -> Array:
    """Sum over axis; bool and narrow integers are summed in int64, half precision in float32 inside."""
    if dtype is not None:
        x = x.astype(dtypes.as_dtype(dtype))
    elif x.dtype == dtypes.bool_ or (dtypes.is_integer(x.dtype) and x.dtype.itemsize < 8):
        x = x.astype(dtypes.int64)
    return jnp.sum(x, axis, keepdims=keepdim)
