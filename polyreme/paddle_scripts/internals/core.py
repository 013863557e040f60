"""paddle.base.core: what scripts ask of PaddlePaddle's C++ core. Hardware that XLA has no backend for is not there."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import rng
from polyreme.core.devices.place import CPUPlace, CUDAPinnedPlace, CUDAPlace, CustomPlace, Place, is_compiled_with_cuda
from polyreme.device import (
    IPUPlace,
    XPUPlace,
    get_available_custom_device,
    is_compiled_with_cinn,
    is_compiled_with_custom_device,
    is_compiled_with_distribute,
    is_compiled_with_ipu,
    is_compiled_with_rocm,
    is_compiled_with_xpu,
    memory,
)
from polyreme.eager.tape import grad_mode
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, Explained, did_you_mean
from polyreme.fluid.core import EOFException, LoDTensor, LoDTensorArray, VarDesc, get_cuda_device_count
from polyreme.paddle_scripts.internals.dtypes import DType
from polyreme.program.scope import Scope

EnforceNotMet = tuple(Explained.__subclasses__())
"""Every error class of polyreme: what `except core.EnforceNotMet` catches."""
DenseTensor = Tensor = LoDTensor
DenseTensorArray = LoDTensorArray


class _DTypes(type):
    """isinstance is true of every dtype."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, DType)


class DTypes(metaclass=_DTypes):
    """The class of dtypes, and the dtypes by their names there."""

    BOOL, UINT8 = dtypes.bool_, dtypes.uint8
    INT8, INT16, INT32, INT64 = dtypes.int8, dtypes.int16, dtypes.int32, dtypes.int64
    FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.float64
    COMPLEX64, COMPLEX128 = dtypes.complex64, dtypes.complex128


DataType = DTypes


class AmpLevel(enum.IntEnum):
    """Levels of autocast, as _dygraph_tracer()._amp_level compares them."""

    O0, O1, O2, O3, OD = range(5)


def is_compiled_with_mkldnn() -> bool:
    """False: XLA brings its own kernels for processors."""
    return False


def is_compiled_with_nccl() -> bool:
    """Whether collectives between GPUs are NCCL's."""
    return is_compiled_with_cuda() and not is_compiled_with_rocm()


def get_xpu_device_count() -> int:
    """0: XLA has no backend for Kunlun XPUs here."""
    return 0


def get_custom_device_count(device_type: str) -> int:
    """How many devices of a platform other than processors and GPUs there are."""
    return sum(name.partition(":")[0] == device_type for name in get_available_custom_device())


def default_cpu_generator() -> rng.Generator:
    """The generator of all random numbers: one serves all devices."""
    return rng.default_generator


def default_cuda_generator(index: int = 0) -> rng.Generator:
    """As default_cpu_generator."""
    return rng.default_generator


default_xpu_generator = default_cuda_generator


def default_custom_device_generator(place: Any) -> rng.Generator:
    """As default_cpu_generator."""
    return rng.default_generator


def device_memory_stat_current_value(stat: str, device_id: int = 0) -> int:
    """Bytes "Allocated" or "Reserved" on a device now."""
    return _memory(stat, memory.memory_allocated, memory.memory_reserved)


def device_memory_stat_peak_value(stat: str, device_id: int = 0) -> int:
    """The most bytes "Allocated" or "Reserved" on a device so far."""
    return _memory(stat, memory.max_memory_allocated, memory.max_memory_reserved)


def _memory(stat: str, allocated: Any, reserved: Any) -> int:
    functions = {"Allocated": allocated, "Reserved": reserved}
    if stat not in functions:
        raise ConfigError(f"device_memory_stat: {stat!r}{did_you_mean(stat, functions)}")
    return functions[stat]()


def size_of_dtype(dtype: Any) -> int:
    """Bytes of an element."""
    return dtypes.as_dtype(dtype).itemsize


def frombuffer(buffer: Any, dtype: Any) -> Any:
    """A copy of the bytes of a buffer as a Tensor of one dim."""
    return to_tensor(np.frombuffer(buffer, dtypes.as_dtype(dtype)))


def set_prim_eager_enabled(value: bool, print_flag: bool = False) -> None:
    """Nothing: derivatives of any order need no smaller ops here."""


def _set_prim_backward_blacklist(*args: str) -> None:
    """Nothing, as set_prim_eager_enabled."""


_set_prim_all_enabled = set_prim_forward_enabled = set_prim_eager_enabled


def _has_grad() -> bool:
    return grad_mode.enabled


def _set_has_grad(value: bool) -> None:
    grad_mode.enabled = bool(value)


__all__ = [
    "AmpLevel", "CPUPlace", "CUDAPinnedPlace", "CUDAPlace", "CustomPlace", "DataType", "DenseTensor",
    "DenseTensorArray", "EOFException", "IPUPlace", "LoDTensor", "LoDTensorArray", "Place", "Scope", "Tensor",
    "VarDesc", "XPUPlace", "default_cpu_generator", "default_cuda_generator", "default_custom_device_generator",
    "default_xpu_generator", "device_memory_stat_current_value", "device_memory_stat_peak_value", "frombuffer",
    "get_cuda_device_count", "get_custom_device_count", "get_xpu_device_count", "is_compiled_with_cinn",
    "is_compiled_with_cuda", "is_compiled_with_custom_device", "is_compiled_with_distribute",
    "is_compiled_with_ipu", "is_compiled_with_mkldnn", "is_compiled_with_nccl", "is_compiled_with_rocm",
    "is_compiled_with_xpu", "set_prim_eager_enabled", "set_prim_forward_enabled", "size_of_dtype",
]  # fmt: skip
