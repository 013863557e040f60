"""What a device is able to do, measured in a few seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme import nn
from polyreme.core.devices.place import set_device
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.jit import to_static
from polyreme.nn.functional import cross_entropy
from polyreme.optimizer import AdamW

BUDGET = 1.0
"""Seconds that one figure may take."""
CALLS = 5
SIZES = {"cpu": 1024, "other": 8192}
"""Rows of the matrices that are multiplied and copied, by platform."""


def measure(device: str) -> dict[str, tuple[float, str]]:
    """Figures by what they are, each with its unit: medians of calls after one that compiles."""
    place = set_device(device)
    size = SIZES.get(place.device().platform, SIZES["other"])
    generator = np.random.default_rng(0)
    figures: dict[str, tuple[float, str]] = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jax.device_put(generator.standard_normal((size, size)).astype(dtype), place.device())
        seconds = _seconds(jax.jit(jnp.matmul), x, x)
        figures[f"product {size}^3, {jnp.dtype(dtype).name}"] = (2 * size**3 / seconds / 1e12, "TFLOP/s")
    block = jax.device_put(generator.standard_normal(size * size).astype(np.float32), place.device())
    figures["copy, bytes read and written"] = (
        2 * block.nbytes / _seconds(jax.jit(lambda x: x + 1), block) / 1e9,
        "GB/s",
    )
    host = np.asarray(block)
    figures["host to device"] = (host.nbytes / _seconds(lambda: jax.device_put(host, place.device())) / 1e9, "GB/s")
    figures["device to host"] = (host.nbytes / _seconds(lambda: np.asarray(block + 0)) / 1e9, "GB/s")
    small = to_tensor(np.ones((32, 32), np.float32))
    figures["one op of 32 x 32, eager"] = (1e6 * _seconds(lambda: (small + small)._array), "us")
    figures["step of a 784-100-10 network, captured"] = (1e6 * _seconds(_step()), "us")
    return figures


def _seconds(run: Callable[..., Any], *args: Any) -> float:
    """Of a call, of CALLS that are sent one after the other and waited for together."""
    jax.block_until_ready(run(*args))
    times: list[float] = []
    while len(times) < 3 or (sum(times) < BUDGET and len(times) < 100):
        start = time.perf_counter()
        jax.block_until_ready([run(*args) for _ in range(CALLS)][-1])
        times.append(time.perf_counter() - start)
    return statistics.median(times) / CALLS


def _step() -> Callable[[], Any]:
    net = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    update = AdamW(1e-3, parameters=net.parameters())

    @to_static
    def step(images: Tensor, labels: Tensor) -> Tensor:
        loss = cross_entropy(net(images), labels)
        loss.backward()
        update.step()
        update.clear_grad()
        return loss

    images, labels = to_tensor(np.ones((64, 784), np.float32)), to_tensor(np.zeros(64, np.int64))
    return lambda: step(images, labels)._array
