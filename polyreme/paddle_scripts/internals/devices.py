"""The default device and its module, by the names of the root, and attributes of places."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from polyreme import device as devices
from polyreme.device.chosen import get_device, place_of, set_device

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
