"""Arrays of a shape, a dtype and a layout over devices that have no memory: what programs are compiled for, not run on.

Inside `abstractly` whatever is put on devices becomes one, so that a model, its optimizer and their programs
can be made for a mesh that is larger than this machine, or not there at all.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core.devices.transfer import full_from_host


class Abstract(np.ndarray):
    """One zero that stands for all elements; jax traces it as it traces any ndarray.

    sharding: where an array of its kind would lie.

    >>> wide = Abstract.of((1 << 20, 1 << 20), np.float32, None)
    >>> wide.shape, wide.strides, wide.astype(np.int8).dtype.name
    ((1048576, 1048576), (0, 0), 'int8')
    """

    sharding: Any
    committed = True
    is_fully_addressable = True

    @classmethod
    def of(cls, shape: Any, dtype: Any, sharding: Any) -> Abstract:
        """An array of this shape, dtype and layout."""
        made = np.broadcast_to(np.zeros((), dtype), tuple(shape)).view(cls)
        made.sharding = sharding
        _abstract_arrays[_address(made)] = made
        return made

    def __array_finalize__(self, obj: Any) -> None:
        self.sharding = getattr(obj, "sharding", None)

    def astype(self, dtype: Any, *_: Any, **__: Any) -> Any:
        """Another dtype, no memory either."""
        return Abstract.of(self.shape, dtype, self.sharding)

    @property
    def described(self) -> jax.ShapeDtypeStruct:
        """The argument types that jax lowers a program for."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)


_abstract_arrays: weakref.WeakValueDictionary[int, Abstract] = weakref.WeakValueDictionary()


def _address(array: Any) -> int:
    return array.__array_interface__["data"][0]


def original(array: Any) -> Any:
    """The Abstract that jax made its own view of when it closed over it; anything else itself."""
    return (
        _abstract_arrays.get(_address(array), array) if mode.is_on and hasattr(array, "__array_interface__") else array
    )


class _Mode(threading.local):
    """Whether arrays are put nowhere."""

    def __init__(self) -> None:
        self.is_on = False


mode: _Mode = _Mode()


@contextmanager
def abstractly() -> Iterator[None]:
    """Inside the block, arrays that are put on devices have no memory, and compiled calls on them do not run."""
    outer, mode.is_on = mode.is_on, True
    try:
        yield
    finally:
        mode.is_on = outer


def described(array: Any) -> Any:
    """An array as jax lowers a program for it: itself, or what an Abstract stands for."""
    return array.described if isinstance(array, Abstract) else array


def full(shape: Any, value: float, dtype: Any) -> Any:
    """jnp.full, or where arrays have no memory, an Abstract."""
    if mode.is_on:
        return Abstract.of(shape, dtype, None)
    # on a device of its own memory filling is quick and sending is not; on CPU a fill is a program for each shape
    fill = full_from_host if jax.default_backend() == "cpu" else jnp.full
    return fill(shape, value, dtype)


def copied(array: Any, dtype: Any) -> Any:
    """A copy in a dtype; of an Abstract, another Abstract."""
    return array.astype(dtype) if isinstance(array, Abstract) else jnp.array(array, dtype)


__all__ = ["Abstract", "abstractly", "copied", "described", "full", "original"]
