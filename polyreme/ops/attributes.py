"""Questions about a Tensor: its size, shape, rank and dtype."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core.annotations import AnyTensor
from polyreme.core.op import composite, op
from polyreme.core.state import TensorState


@op
def numel(x: Array) -> Array:
    """Number of elements, as a 0-D int64 Tensor."""
    return jnp.asarray(x.size, dtypes.int64)


@op(method=False)
def shape(input: Array) -> Array:
    """Size of each dim, as an int64 Tensor [ndim]; Tensor.shape gives it as a list."""
    return jnp.asarray(input.shape, dtypes.int64)


@op
def rank(input: Array) -> Array:
    """Number of dims, as a 0-D int32 Tensor; Tensor.ndim gives it as an int."""
    return jnp.asarray(input.ndim, dtypes.int32)


@op
def is_empty(x: Array) -> Array:
    """Whether there are no elements, as a 0-D bool Tensor."""
    return jnp.asarray(x.size == 0)


@composite
def is_tensor(x: Any) -> bool:
    """Whether x is a Tensor."""
    return isinstance(x, TensorState)


@composite(method=False)
def is_complex(x: AnyTensor) -> bool:
    """Whether x has a complex dtype."""
    return dtypes.is_complex(x.dtype)


@composite(method=False)
def is_floating_point(x: AnyTensor) -> bool:
    """Whether x has a floating dtype."""
    return dtypes.is_floating(x.dtype)


@composite(method=False)
def is_integer(x: AnyTensor) -> bool:
    """Whether x has an integer dtype; bool is none."""
    return dtypes.is_integer(x.dtype)


@composite(method=False)
def tolist(x: AnyTensor) -> Any:
    """The value as nested lists of Python numbers. Reads the host: raises CaptureError inside a capture."""
    return x.tolist()
