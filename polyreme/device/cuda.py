"""polyreme.device.cuda: GPUs. On a machine without any, functions that take a device speak of the default one."""

from typing import Any

import jax

from polyreme.core.devices.place import is_compiled_with_cuda
from polyreme.device.facts import get_device_capability, get_device_name, get_device_properties
from polyreme.device.memory import (
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_summary,
    reset_max_memory_allocated,
    reset_max_memory_reserved,
)
from polyreme.device.queue import Event, Stream, current_stream, stream_guard, synchronize


def device_count() -> int:
    """Number of GPUs that this process drives."""
    return len(jax.local_devices(backend="gpu")) if is_compiled_with_cuda() else 0


def vmm_compact(device: Any = None) -> None:
    """Raises NotImplementedError: XLA's allocator moves nothing."""
    raise NotImplementedError(
        "vmm_compact: XLA's allocator does not move what it gave out; see XLA_PYTHON_CLIENT_ALLOCATOR in jax's "
        "documentation for others"
    )


__all__ = [
    "Event",
    "Stream",
    "current_stream",
    "device_count",
    "empty_cache",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_summary",
    "reset_max_memory_allocated",
    "reset_max_memory_reserved",
    "stream_guard",
    "synchronize",
    "vmm_compact",
]
