"""Rows of the contract compiled for a device that is not here: a TPU slice by libtpu, an NVIDIA GPU by lowering.

Compiling says that every kernel and operation there is has a form on that platform, not that it computes what it must.
"""

from __future__ import annotations

import importlib.metadata
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import SingleDeviceSharding

from polyreme.conformance.arithmetic import factor_bits
from polyreme.conformance.case import Case, flat
from polyreme.core import rng
from polyreme.core.devices.absent import AbsentDevice, slice_devices
from polyreme.eager.tensor import Tensor
from polyreme.kernels import select

GPU = "cuda"


@dataclass(frozen=True)
class Target:
    """What rows are compiled for. name: of a TPU slice, or "cuda"; device: one of its devices, in jax's words."""

    name: str
    device: Any

    @classmethod
    def named(cls, name: str) -> Target:
        """Raises ConfigError for a slice that there is not, or without libtpu."""
        return cls(name, AbsentDevice(GPU, "NVIDIA GPU") if name == GPU else slice_devices(name)[0])

    def describe(self) -> dict[str, Any]:
        """As worker.describe of a device that is here."""
        version = "lowered by jax" if self.name == GPU else f"libtpu {importlib.metadata.version('libtpu')}"
        platform = self.device.platform
        return {
            "device": self.name,
            "kind": self.device.device_kind,
            "platform": platform,
            "platform_version": version,
            "devices": 1 if self.name == GPU else len(slice_devices(self.name)),
            "factor_bits": factor_bits("gpu" if self.name == GPU else platform),
            "jax": jax.__version__,
            "python": sys.version.split()[0],
        }

    def compile(self, run: Any, arrays: list[np.ndarray]) -> None:
        """Compile a function of these arrays, as shapes; for a GPU to its kernels and StableHLO."""
        with select.compiling_for(self.device), warnings.catch_warnings():
            # programs for devices that are not here are written to the compile cache, and cannot be read
            warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
            if self.name == GPU:
                specs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
                export.export(jax.jit(run), platforms=(GPU,))(*specs)
                return
            there = SingleDeviceSharding(self.device)
            specs = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=there) for array in arrays]
            jax.jit(run).lower(*specs).compile()


def outcome(case: Case, target: Target) -> dict[str, Any]:
    """What came of a row: its call, with the gradient where it has one, compiled."""
    start = time.perf_counter()
    answer: dict[str, Any] = {"name": case.id, "status": "passed", "detail": ""}
    if case.host:
        return answer | {"status": "skipped", "detail": f"runs on the host: {case.host}", "seconds": 0.0}
    args = case.arguments()

    def run(*arrays: jax.Array) -> Any:
        given = _with_arrays(args, iter(arrays))
        if case.no_grad:
            return [t._array for t in flat(case.call(given))]
        outs, grads = case.call_with_gradients(given)
        return [t._array for t in outs], [None if g is None else g._array for g in grads]

    try:
        target.compile(run, _arrays(args))
    except Exception as error:  # noqa: BLE001  (what fails is what is asked)
        first = next(iter(str(error).splitlines()), "")
        answer |= {"status": "failed", "detail": f"{type(error).__name__}: {first[:500]}"}
    finally:
        rng.seed(7)  # tracing has left its own value in the generator
    return answer | {"seconds": round(time.perf_counter() - start, 3)}


def _arrays(value: Any) -> list[np.ndarray]:
    if isinstance(value, np.ndarray):
        return [value]
    return [array for each in value for array in _arrays(each)] if isinstance(value, (list, tuple)) else []


def _with_arrays(value: Any, arrays: Iterator[jax.Array]) -> Any:
    """Arguments with a Tensor of the next array in the place of each ndarray."""
    if isinstance(value, np.ndarray):
        return Tensor(next(arrays))
    return type(value)(_with_arrays(each, arrays) for each in value) if isinstance(value, (list, tuple)) else value
