"""The device new Tensors go to: read, set, set for a block."""

from __future__ import annotations

from typing import Any

import jax

from polyreme.core.devices import place as places
from polyreme.core.devices.place import Place, as_place, default_place
from polyreme.core.engine import backend
from polyreme.core.state import TensorState
from polyreme.errors import DeviceError


def place_of(device: Any) -> Place:
    """The Place of a name, Place, jax device, index on the default device's platform, or, for None, the default one."""
    if device is None:
        return default_place()
    if isinstance(device, int):
        return Place(default_place().platform, device)
    return as_place(device)


def get_device(input: Any = None) -> Any:
    """Where new Tensors go, as "cpu" or "gpu:0"; of a Tensor, the index of its device, -1 for the processor."""
    if not isinstance(input, TensorState):
        return places.get_device()
    place = as_place(min(input._array.devices(), key=lambda d: d.id))
    return -1 if place.is_cpu_place() else place.index


def set_device(device: Any) -> Place:
    """Put new Tensors on this device from now on: a name, Place or index. Raises DeviceError if it is not there."""
    return places.set_device(place_of(device))


class device:
    """A block in which new Tensors go to another device; None, or an index below 0, leaves it as it is.

    >>> with device("cpu"):
    ...     get_device()
    'cpu'
    """

    def __init__(self, device: Any = None) -> None:
        stays = device is None or (isinstance(device, int) and device < 0)
        self._place = None if stays else place_of(device)
        self._outer: list[Any] = []

    def __enter__(self) -> None:
        self._outer.append(backend.config.jax_default_device)
        if self._place is not None:
            places.set_device(self._place)

    def __exit__(self, *_: object) -> None:
        jax.config.update("jax_default_device", self._outer.pop())


device_guard = device


class Device(str):
    """A device by its name, with type and index (None if not said): what `paddle.device("cuda", 0)` gives.

    It can stand wherever the name can, and for a block in which new Tensors go to it. type: a name, with the index
    behind a colon or as the second argument; a Place; or an index on the default device's platform. Whether it is
    there is seen where it is used. Raises DeviceError for what names no device.

    >>> Device("cuda", 1), Device("cuda:1").index, Device("cpu").type
    ('cuda:1', 1, 'cpu')
    """

    type: str
    index: int | None

    __slots__ = ("_blocks", "index", "type")

    def __new__(cls, type: Any = None, index: int | None = None) -> Device:
        if not isinstance(type, str):
            place = place_of(type)
            type = "cpu" if place.is_cpu_place() and not place.index else f"{place.platform}:{place.index}"
        as_place(type)
        name, _, number = type.partition(":")
        if number and index is not None:
            raise DeviceError(f"device({type!r}, {index}): the index is said twice; leave one out")
        index = int(number) if number else index
        named = super().__new__(cls, name if index is None else f"{name}:{index}")
        named.type, named.index, named._blocks = name, index, []
        return named

    def __enter__(self) -> Device:
        self._blocks.append(device(str(self)))
        self._blocks[-1].__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._blocks.pop().__exit__()
