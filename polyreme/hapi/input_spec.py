"""InputSpec: the shape, dtype and name an input is going to have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.errors import ConfigError


class InputSpec:
    """What an input looks like before there is one; None or -1 in shape stands for a size that varies.

    >>> InputSpec([None, 784], "float32", "image")
    InputSpec(shape=[None, 784], dtype=float32, name='image')
    """

    dtype: np.dtype[Any]

    def __init__(
        self, shape: Sequence[int | None], dtype: Any = "float32", name: str | None = None, stop_gradient: bool = False
    ) -> None:
        if isinstance(shape, (int, str)) or not isinstance(shape, Iterable):
            raise ConfigError(f"InputSpec: shape={shape!r}; give a list of sizes, such as [None, 784]")
        self.shape: tuple[int | None, ...] = tuple(_size(d) for d in shape)
        self.dtype = dtypes.as_dtype(dtype)
        self.name = name
        self.stop_gradient = stop_gradient

    @classmethod
    def from_tensor(cls, tensor: Any, name: str | None = None) -> Self:
        """The spec of a Tensor."""
        return cls(tensor.shape, tensor.dtype, name or tensor.name)

    @classmethod
    def from_numpy(cls, ndarray: np.ndarray, name: str | None = None) -> Self:
        """The spec of an ndarray."""
        return cls(ndarray.shape, ndarray.dtype, name)

    def batch(self, batch_size: int) -> Self:
        """Puts a batch dim in front, in place."""
        if isinstance(batch_size, bool) or not isinstance(batch_size, int):
            raise ConfigError(f"InputSpec.batch: batch_size={batch_size!r}; give a whole number")
        self.shape = (_size(batch_size), *self.shape)
        return self

    def unbatch(self) -> Self:
        """Takes the first dim away, in place."""
        if not self.shape:
            raise ConfigError("InputSpec.unbatch: the shape [] has no dim to take away")
        self.shape = self.shape[1:]
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InputSpec) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"InputSpec(shape={list(self.shape)}, dtype={self.dtype.name}, name={self.name!r})"

    def _key(self) -> tuple:
        return self.shape, self.dtype, self.name, self.stop_gradient


def _size(dim: Any) -> int | None:
    if dim is None or dim == -1:
        return None
    if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)) or dim < 0:
        raise ConfigError(f"InputSpec: a dim is {dim!r}; give a size, or None where it varies")
    return int(dim)
