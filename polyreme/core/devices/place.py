"""Devices by Paddle's names: places, and the one that new Tensors go to.

"cpu", "gpu:1" and the Place classes all name jax devices; any other platform is a CustomPlace, a registered plugin's
(core.engine.plugins) too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from polyreme.core.engine import (
    backend,  # configures jax before devices are listed
    plugins,
)
from polyreme.errors import DeviceError, nearest

_KNOWN = ("cpu", "gpu", "tpu", "xpu", "npu")
_PLATFORMS = {"gpu": ("cuda", "rocm", "gpu"), "cpu": ("cpu",)}


@dataclass(frozen=True, eq=False)
class Place:
    """A device: platform name and index among that platform's devices. Places of one device are equal."""

    platform: str
    index: int = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and (self.platform, self.index) == (other.platform, other.index)

    def __hash__(self) -> int:
        return hash((self.platform, self.index))

    def get_device_id(self) -> int:
        """Index of the device on its platform."""
        return self.index

    def is_cpu_place(self) -> bool:
        return self.platform == "cpu"

    def is_gpu_place(self) -> bool:
        return self.platform == "gpu"

    def is_cuda_pinned_place(self) -> bool:
        return self.platform == "gpu_pinned"

    def is_xpu_place(self) -> bool:
        return self.platform == "xpu"

    def is_custom_place(self) -> bool:
        """True for a device of another platform."""
        return self.platform not in ("cpu", "gpu", "gpu_pinned", "xpu")

    def gpu_device_id(self) -> int:
        return self.get_device_id()

    def xpu_device_id(self) -> int:
        return self.get_device_id()

    def custom_device_id(self) -> int:
        return self.get_device_id()

    def custom_device_type(self) -> str:
        """The name of a platform that is not built in; empty for those that are."""
        return self.platform if self.is_custom_place() else ""

    def device(self) -> backend.Device:
        """The jax device. Raises DeviceError, listing what there is, if it is missing."""
        for platform in _PLATFORMS.get(self.platform, (self.platform,)):
            try:
                devices = jax.local_devices(backend=platform)
            except RuntimeError:
                continue
            if self.index < len(devices):
                return devices[self.index]
            more = f"; CPU_NUM={self.index + 1} gives so many virtual ones" if self.platform == "cpu" else ""
            raise DeviceError(
                f"asked for {self.platform}:{self.index}, but there are {len(devices)} {self.platform} devices "
                f"(0..{len(devices) - 1}){more}"
            )
        have = ", ".join(get_available_device())
        near = "" if self.platform in _KNOWN else nearest(self.platform, _KNOWN)
        raise DeviceError(
            f"asked for {self.platform}:{self.index}, but no {self.platform} is available{near}; here: {have}"
        )

    def __repr__(self) -> str:
        return f"Place({self.platform})" if self.platform == "cpu" else f"Place({self.platform}:{self.index})"


class CPUPlace(Place):
    """The host's processor; one of CPU_NUM virtual devices when an index is given."""

    def __init__(self, index: int = 0) -> None:
        super().__init__("cpu", index)


class CUDAPlace(Place):
    """A GPU."""

    def __init__(self, id: int = 0) -> None:
        super().__init__("gpu", id)


class CUDAPinnedPlace(Place):
    """Page-locked memory of the host, from which a GPU copies without a detour; it needs a GPU."""

    def __init__(self) -> None:
        super().__init__("gpu_pinned")

    def device(self) -> Any:
        """The device of arrays: host memory that the first GPU reads. Raises DeviceError without a GPU."""
        return jax.sharding.SingleDeviceSharding(CUDAPlace(0).device(), memory_kind="pinned_host")


class CustomPlace(Place):
    """A device of any other PJRT platform, by the platform's name, or that of a plugin: CustomPlace("tpu", 0)."""

    def __init__(self, dev_type: str, dev_id: int = 0) -> None:
        super().__init__(dev_type, dev_id)


def as_place(device: Any) -> Place:
    """The Place that "cpu", "gpu", "gpu:1", "tpu:0", a Place or a jax device stands for; DeviceError otherwise."""
    if isinstance(device, Place):
        return device
    if isinstance(device, jax.Device):
        plugin = plugins.name_of(device)  # its devices may call themselves "cpu"
        if plugin is not None:
            return Place(plugin, jax.local_devices(backend=plugin).index(device))
        platform = "gpu" if device.platform in _PLATFORMS["gpu"] else device.platform
        return Place(platform, jax.local_devices(backend=device.platform).index(device))
    if isinstance(device, str):
        name, _, index = device.partition(":")
        if device == "gpu_pinned":
            return CUDAPinnedPlace()
        name = "gpu" if name == "cuda" else name
        if name and (not index or index.isdigit()):
            return Place(name, int(index or 0))
    raise DeviceError(f"{device!r} is not a device; write 'cpu', 'gpu:0', another platform's name, or give a Place")


def set_device(device: Any) -> Place:
    """Put new Tensors on this device from now on. Raises DeviceError if it is not there."""
    place = as_place(device)
    jax.config.update("jax_default_device", place.device())
    return place


def default_place() -> Place:
    """The place of new Tensors."""
    chosen = backend.config.jax_default_device
    return as_place(chosen if isinstance(chosen, jax.Device) else jax.local_devices()[0])


def get_device() -> str:
    """The place of new Tensors, as "cpu" or "gpu:0"."""
    place = default_place()
    return "cpu" if place.is_cpu_place() else f"{place.platform}:{place.index}"


def get_available_device() -> list[str]:
    """Every device that can be named, such as ["cpu"] or ["gpu:0", "gpu:1"]."""
    names = []
    for device in (*jax.local_devices(), *plugins.devices()):
        place = as_place(device)
        names.append("cpu" if place.is_cpu_place() and place.index == 0 else f"{place.platform}:{place.index}")
    return names


def device_count() -> int:
    """Number of devices of the default platform this process drives."""
    return jax.local_device_count()


def is_compiled_with_cuda() -> bool:
    """True if a GPU backend is there."""
    try:
        return bool(jax.local_devices(backend="gpu"))
    except RuntimeError:
        return False
