"""Tensors to and from other libraries on the same device, by DLPack."""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import jax.numpy as jnp

from polyreme.core import state
from polyreme.core.devices import place as places
from polyreme.core.state import TensorState
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError

_DEVICE_AT = 8  # bytes into DLTensor, after the data pointer: device type and index, int32 each (dlpack.h)


class _Capsule:
    """A DLPack capsule as the object with methods that jax asks for."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        start = pointer(capsule, b"dltensor")
        self.device = tuple((ctypes.c_int32 * 2).from_address(start + _DEVICE_AT))

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, ...]:
        return self.device


def from_dlpack(dlpack: Any, device: Any = None, copy: bool | None = None) -> Tensor:
    """A Tensor with a copy of what another library holds: an object with __dlpack__ (torch, NumPy, cupy, ...) or a
    capsule, which is used up.

    device: where the Tensor goes, by default where the other is. Always a copy, without a way over the host: captured
    steps write over what Tensors held, and must not write over another library's memory. copy=False raises ConfigError.
    """
    if copy is False:
        raise ConfigError("from_dlpack: copy=False; a Tensor owns its memory here, leave copy out")
    if isinstance(dlpack, TensorState):
        array = state.read(dlpack)
    elif hasattr(dlpack, "__dlpack__"):
        array = jax.dlpack.from_dlpack(dlpack)
    elif type(dlpack).__name__ == "PyCapsule":
        array = jax.dlpack.from_dlpack(_Capsule(dlpack))
    else:
        raise TypeError(f"from_dlpack takes an object with __dlpack__ or a capsule, got {type(dlpack).__name__}")
    array = jnp.array(array, copy=True)
    return Tensor(array if device is None else jax.device_put(array, places.as_place(device).device()))


def to_dlpack(x: Tensor) -> Any:
    """A DLPack capsule of a Tensor's memory, for another library's from_dlpack; it may be read, not written.

    Raises CaptureError inside a capture, TypeError for what is no Tensor.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"to_dlpack takes a Tensor, got {type(x).__name__}")
    return x.__dlpack__()
