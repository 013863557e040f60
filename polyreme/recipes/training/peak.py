"""The arithmetic rate a device can reach: from its data sheet where known, else measured with one matmul."""

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

# Dense 16-bit FLOP/s of one device, from the vendors' data sheets; the key is looked for in jax's device_kind.
_DATA_SHEET = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "TPU v6": 918e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v4": 275e12,
}


@dataclass(frozen=True)
class Peak:
    """FLOP/s all devices of the run reach together, and what to call the share of it that is used."""

    flops_per_second: float
    label: str


def find_peak(devices: Sequence[Any], dtype: str) -> Peak:
    """Peak of the devices for matmuls of this dtype.

    "MFU" is used against a data sheet. Where none applies (a CPU, float32, an unlisted device) one matmul is timed, for
    about a third of a second and once a process, and the share is called "utilisation". Virtual CPU devices share the
    machine's cores: they count once.
    """
    device = devices[0]
    if dtype in ("bfloat16", "float16"):
        for name, flops in _DATA_SHEET.items():
            if name in device.device_kind:
                return Peak(flops * len(devices), "MFU")
    count = 1 if device.platform == "cpu" else len(devices)
    return Peak(_measure(device, dtype) * count, "utilisation")


def bytes_in_use(devices: Sequence[Any]) -> int:
    """Most memory held on any one of the devices, bytes; 0 where a device does not say, as a CPU does not."""
    return max((device.memory_stats() or {}).get("bytes_in_use", 0) for device in devices)


@functools.cache
def _measure(device: Any, dtype: str) -> float:
    """FLOP/s of a square matmul: the best of several runs, as others may be using the machine."""
    size = 1024 if device.platform == "cpu" else 8192
    x = jax.device_put(jnp.ones((size, size), dtype), device)
    matmul = jax.jit(jnp.matmul)
    matmul(x, x).block_until_ready()
    best, stop = float("inf"), time.perf_counter() + 0.3
    while time.perf_counter() < stop:
        start = time.perf_counter()
        matmul(x, x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
