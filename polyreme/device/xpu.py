"""polyreme.device.xpu: Kunlun XPUs, which XLA has no backend for here: there are none, and asking about one says so."""

from typing import Any, NoReturn

from polyreme.device.memory import empty_cache
from polyreme.device.queue import Event, Stream
from polyreme.errors import DeviceError


def device_count() -> int:
    """0: XLA has no backend for XPUs here."""
    return 0


def _absent(name: str) -> Any:
    def asked(device: Any = None) -> NoReturn:
        raise DeviceError(
            f"device.xpu.{name}: XLA has no backend for Kunlun XPUs here; polyreme.device.{_INSTEAD.get(name, name)} "
            "speaks of the devices there are"
        )

    asked.__name__ = asked.__qualname__ = name
    asked.__doc__ = "Raises DeviceError: there are no XPUs."
    return asked


_INSTEAD = {"memory_total": "get_device_properties", "memory_used": "memory_allocated", "set_debug_level": "get_device"}
max_memory_allocated: Any = _absent("max_memory_allocated")
max_memory_reserved: Any = _absent("max_memory_reserved")
memory_allocated: Any = _absent("memory_allocated")
memory_reserved: Any = _absent("memory_reserved")
memory_total: Any = _absent("memory_total")
memory_used: Any = _absent("memory_used")
reset_max_memory_allocated: Any = _absent("reset_max_memory_allocated")
reset_max_memory_reserved: Any = _absent("reset_max_memory_reserved")
synchronize: Any = _absent("synchronize")


def set_debug_level(level: int = 0) -> NoReturn:
    """Raises DeviceError: it is a setting of XPUs' libraries."""
    raise DeviceError(
        f"device.xpu.set_debug_level({level}): XLA has no backend for Kunlun XPUs here; POLYREME_DEBUG=1 "
        "shows tracebacks"
    )


__all__ = [
    "Event",
    "Stream",
    "device_count",
    "empty_cache",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_total",
    "memory_used",
    "reset_max_memory_allocated",
    "reset_max_memory_reserved",
    "set_debug_level",
    "synchronize",
]
