"""Values in the host's memory that devices copy from and to, each standing as the array of a Tensor."""

from __future__ import annotations

from typing import Any

import jax

from polyreme.core.meshes import HOST
from polyreme.core.state import Elsewhere
from polyreme.errors import ShapeError


class HostArray(Elsewhere):
    """An array whose value lies in host memory, laid out over the host memories of its devices.

    sharding: where it lies on the devices when it is read.
    """

    def __init__(self, value: Any, sharding: Any) -> None:
        super().__init__(value.shape, value.dtype, sharding)
        self._place = sharding.with_memory_kind(HOST)
        self._array = jax.device_put(value, self._place, may_alias=False)

    @property
    def saved(self) -> jax.Array:
        return self._array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self._array.__array__(dtype)

    def read(self) -> jax.Array:
        """The value on the devices; does not wait for it."""
        return jax.device_put(self._array, self.sharding)

    def fill(self, array: Any) -> None:
        """Replace the value. Raises ShapeError for one of another shape."""
        if tuple(array.shape) != self.shape:
            raise ShapeError(f"a value in host memory has shape {list(self.shape)}, the new one {list(array.shape)}")
        self._array = jax.device_put(array.astype(self.dtype), self._place, may_alias=False)
