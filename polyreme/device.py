"""polyreme.device: which devices there are and which one new Tensors go to.

Floor: 4.
"""

from typing import Any

import jax

from polyreme.core.place import (
    as_place,
    default_place,
    device_count,
    get_available_device,
    get_device,
    is_compiled_with_cuda,
    set_device,
)
from polyreme.core.rng import get_rng_state, set_rng_state


def synchronize(device: Any = None) -> None:
    """Wait until everything sent to the device (the default one, if none is given) has run."""
    place = default_place() if device is None else as_place(device)
    jax.device_put(0, place.device()).block_until_ready()


def max_memory_allocated(device: Any = None) -> int:
    """Most memory in use on the device so far, bytes; 0 where a device does not say, as a CPU does not."""
    return _memory(device).get("peak_bytes_in_use", 0)


def memory_allocated(device: Any = None) -> int:
    """Memory in use on the device, bytes; 0 where a device does not say, as a CPU does not."""
    return _memory(device).get("bytes_in_use", 0)


def _memory(device: Any) -> dict[str, int]:
    place = default_place() if device is None else as_place(device)
    return place.device().memory_stats() or {}


__all__ = [
    "device_count",
    "get_available_device",
    "get_device",
    "get_rng_state",
    "is_compiled_with_cuda",
    "max_memory_allocated",
    "memory_allocated",
    "set_device",
    "set_rng_state",
    "synchronize",
]
