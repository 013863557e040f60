"""Initial values with a structure: given ones, orthogonal rows, convolutions that pass on or upsample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import draws, state
from polyreme.core.state import TensorState
from polyreme.errors import ConfigError, ShapeError
from polyreme.nn.initializer.base import Initializer, array_of


class Assign(Initializer):
    """The values given: an array, list or Tensor of the parameter's shape."""

    value: np.ndarray

    def __init__(self, value: Any, name: str | None = None) -> None:
        self.value = state.host(value, "Assign(value)") if isinstance(value, TensorState) else np.asarray(value)

    def values(self, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        if self.value.shape != tuple(shape):
            raise ShapeError(
                f"Assign: a value of shape {list(self.value.shape)} for a parameter of shape {list(shape)}"
            )
        return array_of(self.value, dtype)


class Orthogonal(Initializer):
    """gain times a matrix with orthonormal rows or columns, whichever are fewer; dims after the first are flattened.

    Uniform over such matrices (QR of a Gaussian, signs fixed). Source: arXiv:1312.6120; arXiv:math-ph/0609050.
    """

    def __init__(self, gain: float = 1.0, name: str | None = None) -> None:
        self.gain = gain

    def values(self, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        if len(shape) < 2:
            raise ShapeError(f"Orthogonal needs a parameter of at least 2 dims, got shape {list(shape)}")
        rows, columns = shape[0], math.prod(shape[1:])
        draw = jnp.asarray(draws.normal(self.key(), (max(rows, columns), min(rows, columns))))
        q, r = jnp.linalg.qr(draw)
        # QR leaves the sign of each column open; without this the result is not uniform
        q = q * jnp.where(jnp.diagonal(r) < 0, -1.0, 1.0)
        return (self.gain * (q.T if rows < columns else q)).reshape(shape).astype(dtype)


class Dirac(Initializer):
    """A convolution's weight [out, in, *kernel] that passes on its inputs: 1 at the centre from input i to output i.

    With groups each group of outputs passes on its own inputs.
    """

    def __init__(self, groups: int = 1, name: str | None = None) -> None:
        if groups < 1:
            raise ConfigError(f"Dirac: groups is at least 1, got {groups}")
        self.groups = groups

    def values(self, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        if not 3 <= len(shape) <= 5:
            raise ShapeError(f"Dirac fills weights of 1-D to 3-D convolutions (3 to 5 dims), got shape {list(shape)}")
        if shape[0] % self.groups:
            raise ShapeError(f"Dirac: {shape[0]} outputs do not split into {self.groups} equal groups")
        weight = np.zeros(shape, np.float32)
        per_group = shape[0] // self.groups
        centre = tuple(size // 2 for size in shape[2:])
        for out in range(shape[0]):
            if out % per_group < shape[1]:
                weight[(out, out % per_group, *centre)] = 1.0
        return array_of(weight, dtype)


class Bilinear(Initializer):
    """Kernels of a transposed convolution [.., .., size, size] that upsample by bilinear interpolation.

    weight[y, x] = (1 - |y / f - c|) (1 - |x / f - c|), f = ceil(size / 2), c = (2 f - 1 - f % 2) / (2 f).
    PaddlePaddle 3.3 takes y with the fraction x / size added, which is no interpolation; here y is the row.
    """

    def values(self, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        if len(shape) != 4 or shape[2] != shape[3]:
            raise ShapeError(f"Bilinear fills weights of shape [.., .., size, size], got {list(shape)}")
        f = math.ceil(shape[3] / 2)
        c = (2 * f - 1 - f % 2) / (2 * f)
        line = 1 - np.abs(np.arange(shape[3]) / f - c)
        return array_of(np.broadcast_to(np.outer(line, line), shape), dtype)
