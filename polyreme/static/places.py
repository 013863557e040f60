"""Places for Programs: lists of devices, and device_guard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax

from polyreme import flags
from polyreme.core.devices.place import CPUPlace, CUDAPlace, CustomPlace, Place, as_place, is_compiled_with_cuda
from polyreme.errors import ConfigError, DeviceError

_NAMES = ("cpu", "gpu", "xpu", "npu", "tpu")


def cpu_places(device_count: int | None = None) -> list[Place]:
    """The host's processor so many times over: as CPU_NUM says if None, once without it.

    >>> len(cpu_places(2))
    2
    """
    count = flags.cpu_num() or 1 if device_count is None else device_count
    if type(count) is not int or count < 1:
        raise ConfigError(f"cpu_places: device_count={device_count!r}; give a whole number of at least 1")
    return [CPUPlace(index) for index in range(count)]


def cuda_places(device_ids: Sequence[int] | None = None) -> list[Place]:
    """The GPUs with these indices; all that this process sees if None. Raises DeviceError if one is missing."""
    if not is_compiled_with_cuda():
        raise DeviceError("cuda_places: no GPU is available here; use cpu_places()")
    ids = range(len(jax.local_devices(backend="gpu"))) if device_ids is None else device_ids
    return _check_exist([CUDAPlace(index) for index in ids])


def xpu_places(device_ids: Sequence[int] | None = None) -> list[Place]:
    """Devices of a PJRT platform named "xpu" with these indices, the first if None; DeviceError if one is missing."""
    return _check_exist([CustomPlace("xpu", index) for index in device_ids or [0]])


def _check_exist(places: list[Place]) -> list[Place]:
    for place in places:
        place.device()
    return places


@contextmanager
def device_guard(device: str | None = None) -> Iterator[None]:
    """Accepts Programs that say where ops run ("cpu", "gpu:0", "gpu:all", None).

    A Program is compiled as a whole for the device of its Executor, so inside the block ops are recorded as elsewhere;
    what they compute is the same. Raises ConfigError for what names no device.
    """
    if device is not None:
        name = device.split(":")[0] if isinstance(device, str) else device
        if name not in _NAMES:
            raise ConfigError(f"device_guard: {device!r} names no device; write 'cpu', 'gpu', 'gpu:0' or 'gpu:all'")
        if not str(device).endswith(":all"):
            as_place(device)
    yield
