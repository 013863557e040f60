"""Memory of devices, in bytes: what the device's allocator says, and for processors the arrays that are alive."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from typing import Any

import jax

from polyreme.core.devices.place import Place
from polyreme.device.chosen import place_of

# names of jax.Device.memory_stats()
_USED, _USED_PEAK = "bytes_in_use", "peak_bytes_in_use"
_POOL, _POOL_PEAK = "pool_bytes", "peak_pool_bytes"


class _Peaks:
    """The most that was seen since a peak was reset: XLA's own peaks cannot be, and processors have none."""

    def __init__(self) -> None:
        self.seen: dict[tuple[Place, str], int] = {}
        self.before: dict[tuple[Place, str], int] = {}

    def see(self, place: Place, name: str, now: int) -> int:
        self.seen[place, name] = max(self.seen.get((place, name), 0), now)
        return now

    def most(self, place: Place, name: str, own: int) -> int:
        # the allocator's own peak counts if it rose since the reset
        return max(self.seen[place, name], own if own > self.before.get((place, name), 0) else 0)

    def reset(self, place: Place, name: str, now: int, own: int) -> None:
        self.seen[place, name], self.before[place, name] = now, own


_peaks = _Peaks()


def memory_allocated(device: Any = None) -> int:
    """Bytes in use: by arrays and programs where the device says, by arrays that are alive on a processor."""
    return _now(place_of(device), _USED)


def memory_reserved(device: Any = None) -> int:
    """Bytes the allocator holds, in use or not; those in use where it does not say."""
    return _now(place_of(device), _POOL)


def max_memory_allocated(device: Any = None) -> int:
    """The most of memory_allocated since the start or the last reset, in bytes.

    A processor has no record of it: there it is the most that these functions were told so far. After a reset the same
    holds for a device until it passes its earlier peak, which XLA cannot forget.
    """
    return _most(place_of(device), _USED)


def max_memory_reserved(device: Any = None) -> int:
    """The most of memory_reserved since the start or the last reset, in bytes; as max_memory_allocated."""
    return _most(place_of(device), _POOL)


def reset_max_memory_allocated(device: Any = None) -> None:
    """Count the peak of memory_allocated from now on."""
    _reset(place_of(device), _USED)


def reset_max_memory_reserved(device: Any = None) -> None:
    """Count the peak of memory_reserved from now on."""
    _reset(place_of(device), _POOL)


def reset_peak_memory_stats(device: Any = None) -> None:
    """Count all peaks of the device from now on."""
    for name in (_USED, _POOL):
        _reset(place_of(device), name)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(free, total) bytes: what XLA may still allocate and what it may in all; of a processor, the machine's memory."""
    place = place_of(device)
    stats = _stats(place)
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats[_USED], stats["bytes_limit"]
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def memory_summary(device: Any = None) -> str:
    """The figures of a device as a table."""
    place = place_of(device)
    free, total = mem_get_info(place)
    rows = {
        "allocated": (memory_allocated(place), max_memory_allocated(place)),
        "reserved": (memory_reserved(place), max_memory_reserved(place)),
    }
    lines = [f"memory of {place}, bytes", f"{'':10}{'now':>20}{'most':>20}"]
    lines += [f"{name:10}{now:20,}{most:20,}" for name, (now, most) in rows.items()]
    return "\n".join([*lines, f"{'free':10}{free:20,}", f"{'total':10}{total:20,}"])


def empty_cache() -> None:
    """Let go of Tensors that only reference cycles hold, and give freed memory of the process back to the system.

    What XLA's allocator holds on an accelerator it keeps for the next program.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def ipc_collect() -> None:
    """Let go of Tensors shared with processes that are done. DataLoader's workers free what they share themselves, so
    what is left is what reference cycles hold.
    """
    gc.collect()


def _stats(place: Place) -> dict[str, int]:
    return place.device().memory_stats() or {}


def _now(place: Place, name: str) -> int:
    stats = _stats(place)
    return _peaks.see(place, name, stats.get(name, stats.get(_USED, 0)) if stats else _alive(place))


def _alive(place: Place) -> int:
    """Bytes of the arrays on a device; an array that several Tensors share counts once."""
    device, seen = place.device(), {}
    for array in jax.live_arrays():
        if device in array.devices() and not array.is_deleted():
            for shard in array.addressable_shards:
                if shard.device == device:
                    seen[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(seen.values())


def _most(place: Place, name: str) -> int:
    _now(place, name)
    return _peaks.most(place, name, _own_peak(place, name))


def _reset(place: Place, name: str) -> None:
    _peaks.reset(place, name, _now(place, name), _own_peak(place, name))


def _own_peak(place: Place, name: str) -> int:
    stats = _stats(place)
    return stats.get({_USED: _USED_PEAK, _POOL: _POOL_PEAK}[name], stats.get(_USED_PEAK, 0))
