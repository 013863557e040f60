"""Measuring this machine for the planner: one matmul curve, one collective curve, memory, and what a call costs.

What is measured becomes a planner.Cluster in planner/calibration.py. Devices that share their units, as
virtual CPU devices do, are all kept busy in every measurement, as they are in training.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from polyreme.core import rng
from polyreme.core.engine.backend import Device
from polyreme.distributed.placement import clear_plan
from polyreme.distributed.planned_step import PlannedStep
from polyreme.kernels import attention
from polyreme.mesh import Plan
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.nn.layer import Layer
from polyreme.optimizer import SGD
from polyreme.planner.calibration import Measured, cluster_of
from polyreme.planner.cluster import Cluster
from polyreme.training import StepPolicy

Report = Callable[[str], None]

_TIMES = 0.12  # seconds that one measurement is repeated for, at least three times
_DECODER = GPTConfig.nano(num_layers=4)
_CHAIN = 8  # calls of an operation in one program, so that the program's dispatch does not count


def run(report: Report = lambda line: None, devices: Sequence[Device] | None = None) -> Cluster:
    """Measure the devices (all of this process by default); under a minute on a processor with two cores.

    report is called with a line about each part as it is done.
    """
    devices = list(jax.devices() if devices is None else devices)
    bench = _Bench(devices)
    measured = Measured(
        kind=devices[0].device_kind,
        platform=devices[0].platform,
        num_devices=len(devices),
        memory=_memory_bytes(devices),
        matmul={dtype: bench.matmul(dtype, report) for dtype in bench.dtypes},
        attention=bench.attention(report),
        streaming=bench.streaming(report),
        few=_few(devices, report),
        all_reduce=bench.collective("all-reduce", report),
        all_gather=bench.collective("all-gather", report),
        launch=bench.launch(report),
        task=bench.task(report),
    )
    return cluster_of(measured)


def _few(devices: Sequence[Device], report: Report) -> list[tuple[float, float]]:
    """(devices, FLOP/s of attention on them together) for rising numbers of a processor's devices."""
    count = len(devices)
    if devices[0].platform != "cpu" or count == 1:
        return []
    counts = [n for n in (1, 2, 4, 8, 16) if n < count] + [count]
    found = [(float(n), max(r for _, r in _Bench(devices[:n]).attention(lambda line: None))) for n in counts]
    report("attention on few: " + ", ".join(f"{rate / 1e9:,.0f} GFLOP/s on {n:.0f}" for n, rate in found))
    return found


class _Bench:
    """Programs over all devices, each device with its own part of dim 0."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = devices
        self.is_cpu = devices[0].platform == "cpu"
        self.mesh = Mesh(np.array(devices), ("all",))
        self.split = NamedSharding(self.mesh, P("all"))
        self.dtypes = ("float32", "bfloat16") if self.is_cpu else ("bfloat16", "float16", "float32")

    def matmul(self, dtype: str, report: Report) -> list[tuple[float, float]]:
        """(FLOP of a product on one device, FLOP/s of all devices together) for square products of rising size."""
        sizes = (32, 64, 128, 256, 512) if self.is_cpu else (256, 512, 1024, 2048, 4096, 8192)
        rates = []
        for size in sizes:
            # each product reads a matrix of its own, as a step's do
            x = self._ones((_CHAIN, size, size), dtype)

            def chain(x: Any) -> Any:
                y = x[:, 0]
                for at in range(_CHAIN):
                    y = jnp.matmul(y, x[:, at])
                return y

            flops = 2.0 * size**3
            rates.append((flops, flops * _CHAIN * len(self.devices) / self._seconds(chain, x)))
        report(f"matmul {dtype}: {max(rate for _, rate in rates) / 1e9:,.0f} GFLOP/s on all devices together")
        return rates

    def attention(self, report: Report) -> list[tuple[float, float]]:
        """The same as matmul, for causal attention in the forward: half of the products' FLOP are carried out."""
        heads, width = (4, 32) if self.is_cpu else (16, 128)
        rates = []
        for seq in (64, 256, 512) if self.is_cpu else (512, 1024, 2048, 4096):
            q = self._ones((2, seq, heads, width), self.dtypes[0])

            def chain(q: Any) -> Any:
                rows = q.reshape(-1, *q.shape[2:])
                for _ in range(2):
                    rows = attention(rows, rows, rows, causal=True)
                return rows

            flops = 2.0 * 2 * seq * seq * heads * width  # two products of 2 s s d, half of each, two rows
            rates.append((flops, flops * 2 * len(self.devices) / self._seconds(chain, q)))
        report(f"attention: {max(rate for _, rate in rates) / 1e9:,.0f} GFLOP/s")
        return rates

    def streaming(self, report: Report) -> list[tuple[float, float]]:
        """(bytes read and written on one device, bytes/s of all devices together)."""
        sizes = (1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22) if self.is_cpu else (1 << 16, 1 << 20, 1 << 24, 1 << 27)
        rates = []
        for size in sizes:
            x = self._ones((size,), "float32")
            moved = 2.0 * 4 * size
            rates.append((moved, moved * len(self.devices) / self._seconds(lambda x: x + 1, x)))
        report(f"memory: {max(rate for _, rate in rates) / 1e9:,.1f} GB/s")
        return rates

    def collective(self, kind: str, report: Report) -> list[tuple[float, float]]:
        """(bytes of the whole result on one device, seconds) of a collective over all devices; [] for one device."""
        count = len(self.devices)
        if count == 1:
            return []
        run = jax.lax.psum if kind == "all-reduce" else jax.lax.all_gather
        rates = []
        for shift in (8, 14, 18, 20, 22) if self.is_cpu else (12, 18, 22, 26):
            nbytes = 1 << shift
            share = nbytes // 4 if kind == "all-reduce" else max(1, nbytes // 4 // count)
            x = self._ones((share,), "float32")

            def chain(x: Any) -> Any:
                # each waits for the one before; what is added keeps them from being merged
                for _ in range(_CHAIN):
                    y = run(x, "all")
                    x = x + y.reshape(-1)[: x.size].reshape(x.shape)
                return x

            spread = jax.shard_map(chain, mesh=self.mesh, in_specs=P("all"), out_specs=P("all"), check_vma=False)
            made = 4.0 * share * (1 if kind == "all-reduce" else count)
            rates.append((made, self._seconds(spread, x) / _CHAIN))
        times = (f"{seconds * 1e6:,.0f} us for {size:,.0f} B" for size, seconds in rates)
        report(f"{kind}: {', '.join(times)}")
        return rates

    def launch(self, report: Report) -> float:
        """Seconds from one small operation of a program to the next, all devices running it."""
        x = self._ones((4, 4), "float32")

        def chain(count: int) -> Callable[[Any], Any]:
            def repeat(x: Any) -> Any:
                y = x
                for _ in range(count):
                    y = jnp.matmul(y, x)
                return y

            return repeat

        few, many = self._seconds(chain(8), x), self._seconds(chain(72), x)
        report(f"operation: {max(many - few, 0) / 64 * 1e6:,.1f} us")
        return max(many - few, 0.0) / 64

    def task(self, report: Report) -> float:
        """Seconds that a pipeline's task costs beyond its operations: forward and backward of a decoder of next to no
        work over stages, less the same as one program over all devices."""
        count = len(self.devices)
        stages = next((n for n in (4, 2) if count % n == 0), 0)
        if not stages:
            return 0.0
        rows = np.ones((8 * count, 16), np.int64)
        whole, _ = self._decoder(Plan.from_degrees(dp=count), rows)
        cut_up, staged = self._decoder(Plan.from_degrees(pp=stages, dp=count // stages, num_microbatches=8), rows)
        tasks = sum(map(len, staged.step.pipeline.schedule(staged.plan.num_microbatches).tables))
        report(f"pipeline task: {max(cut_up - whole, 0) / tasks * 1e6:,.0f} us")
        return max(cut_up - whole, 0.0) / tasks

    def _decoder(self, plan: Plan, rows: np.ndarray) -> tuple[float, PlannedStep]:
        """Seconds of a decoder's forward and backward under a plan, and its step."""
        planned = PlannedStep(
            GPT(_DECODER), plan, lambda model: SGD(parameters=model.parameters()), StepPolicy(), self.devices
        )
        batch = planned.cut(rows, rows)
        return _least(planned.model, lambda: planned.step.gradients(batch)[0]._array), planned

    def _ones(self, shape: tuple[int, ...], dtype: str) -> jax.Array:
        """An array with `shape` on each device; small enough values that a chain of products stays finite."""
        whole = np.full((len(self.devices), *shape), 1 / 1024, np.float32)
        return jax.device_put(jnp.asarray(whole, dtype), self.split)

    def _seconds(self, fn: Callable[[Any], Any], x: jax.Array) -> float:
        """Seconds of one call: the best of several, as others may be using the machine."""
        program = jax.jit(fn, out_shardings=self.split)
        jax.block_until_ready(program(x))
        best, times, stop = math.inf, 0, time.perf_counter() + _TIMES
        while times < 3 or time.perf_counter() < stop:
            start = time.perf_counter()
            jax.block_until_ready(program(x))
            best, times = min(best, time.perf_counter() - start), times + 1
        return best


def _least(model: Layer, step: Callable[[], Any]) -> float:
    """Seconds of a forward and backward: the least of several. The plan in force is cleared."""
    best = math.inf
    for _ in range(12):
        for p in model.parameters():
            p.clear_grad(set_to_zero=False)
        jax.block_until_ready(rng.default_generator.key_state()._array)
        start = time.perf_counter()
        jax.block_until_ready(step())
        best = min(best, time.perf_counter() - start)
    clear_plan()
    return best


def _memory_bytes(devices: Sequence[Device]) -> float:
    """Bytes of one device; virtual CPU devices have the machine's memory together."""
    stats = devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / len(devices)
