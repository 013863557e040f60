"""Arrays on several sets of devices, such as pipeline stages: who holds an array, and copies of small ones elsewhere.

One compiled program takes arrays of one set of devices only.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from polyreme.core.devices.abstract import Abstract
from polyreme.core.engine.plugins import kind_of
from polyreme.core.state import Tracer

Devices = tuple[tuple[str, int], ...]
"""(kind, id) of each device of a set, sorted; () for an array that may be moved to any."""

HOST = "pinned_host"
"""Kind of the host memory that devices copy from and to."""


@functools.lru_cache(maxsize=4096)
def _devices(sharding: Sharding) -> Devices:
    return tuple(sorted((kind_of(d), d.id) for d in sharding.device_set))


def devices_of(array: jax.Array) -> Devices:
    """The devices that hold the array; () if it was never put anywhere, so that it goes where others are."""
    return _devices(array.sharding) if array.committed else ()


@functools.lru_cache(maxsize=4096)
def everywhere(sharding: Sharding) -> Sharding:
    """A whole copy, in device memory, on each device of another sharding."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    if isinstance(sharding, SingleDeviceSharding):
        return SingleDeviceSharding(*sharding.device_set)
    devices = sorted(sharding.device_set, key=lambda d: d.id)
    return NamedSharding(Mesh(np.asarray(devices), ("all",)), PartitionSpec())


def beside(array: Any, other: Any) -> Any:
    """array if it can be in one program with the other, else a copy of it on each of the other's devices.

    Inside a captured or compiled function all arrays are of one program already.
    """
    if isinstance(array, Tracer) or isinstance(other, Tracer):
        return array
    have, want = devices_of(array), devices_of(other)
    if not have or not want or have == want:
        return array
    place = everywhere(other.sharding)
    return Abstract.of(array.shape, array.dtype, place) if isinstance(array, Abstract) else jax.device_put(array, place)


def on_one_device(array: jax.Array) -> jax.Array:
    """A whole copy on the first of its devices in this process alone."""
    if len(array.sharding.device_set) == 1:
        return array
    whole = array if array.is_fully_replicated else jax.device_put(array, everywhere(array.sharding))
    return whole.addressable_data(0)
