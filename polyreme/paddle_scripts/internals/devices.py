"""The default device and its module, by the names of the root, and attributes of places."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

from polyreme import device as devices
from polyreme.device.chosen import get_device, place_of, set_device
from polyreme.errors import NotReadyError
from polyreme.profiler import RecordEvent

CUDA_HOME = None
"""Folder of a CUDA toolkit: XLA brings what it needs of one."""
IS_WINDOWS = sys.platform == "win32"


def get_default_device() -> str:
    """Where new Tensors go: "cpu", or a name with an index such as "gpu:0"."""
    return get_device()


def set_default_device(device: Any) -> None:
    """Let new Tensors go to a device: "gpu:0", a Place, or an index."""
    set_device(device)


def get_device_module(device: Any = None) -> ModuleType:
    """The module of a device's functions: device.cuda for a GPU, device.xpu for an XPU, device itself for the rest."""
    platform = place_of(device).platform
    return {"gpu": devices.cuda, "xpu": devices.xpu}.get(platform, devices)


class PlaceNames:
    """Attributes of Place: of hardware that no Place here is, and comparisons."""

    def is_ipu_place(self) -> bool:
        """False: there is no such device here."""
        return False

    is_xpu_pinned_place = is_ipu_place

    def _equals(self: Any, other: Any) -> bool:
        return self == other


class _Ranges(threading.local):
    """The ranges that this thread has open, outermost first."""

    def __init__(self) -> None:
        self.open: list[RecordEvent] = []


_ranges = _Ranges()


def range_push(msg: str) -> None:
    """Begin a range of this name in the trace of a Profiler that records, inside those that are open."""
    event = RecordEvent(msg)
    event.begin()
    _ranges.open.append(event)


def range_pop() -> None:
    """End the range that was begun last. Raises NotReadyError where none is open."""
    if not _ranges.open:
        raise NotReadyError("range_pop() without range_push(); push a range first")
    _ranges.open.pop().end()
