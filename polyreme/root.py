"""Root names that are not ops: Tensor, dtypes, devices, modes, seeds, saving, and the high-level entry points."""

import builtins
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from polyreme.amp import auto_cast, get_autocast_dtype, is_autocast_enabled
from polyreme.autograd import grad
from polyreme.core.devices.place import (
    CPUPlace,
    CUDAPinnedPlace,
    CUDAPlace,
    CustomPlace,
    is_compiled_with_cuda,
    set_device,
)
from polyreme.core.dtype import (
    as_dtype,
    bfloat16,
    complex64,
    complex128,
    finfo,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
    float64,
    get_default_dtype,
    iinfo,
    int8,
    int16,
    int32,
    int64,
    set_default_dtype,
    uint8,
    uint16,
    uint32,
    uint64,
)
from polyreme.core.dtype import bool_ as bool  # the public name
from polyreme.core.rng import Generator, get_rng_state, seed, set_rng_state
from polyreme.device.chosen import get_device
from polyreme.device.cuda import device_count as gpu_count
from polyreme.eager.dlpack import from_dlpack, to_dlpack
from polyreme.eager.memory import Size
from polyreme.eager.mode import enable_grad, is_grad_enabled, no_grad, set_grad_enabled
from polyreme.eager.tensor import Tensor, print_options, to_tensor
from polyreme.eager.typed import (
    BFloat16Tensor,
    BoolTensor,
    ByteTensor,
    CharTensor,
    DoubleTensor,
    FloatTensor,
    HalfTensor,
    IntTensor,
    LongTensor,
    ShortTensor,
)
from polyreme.errors import ConfigError, DTypeError
from polyreme.flags import get_flags, set_flags
from polyreme.io.mmap_storage import MmapStorage
from polyreme.io.serialization import load, save
from polyreme.nn.flops import flops
from polyreme.nn.functional import adaptive_avg_pool1d, conv1d, conv2d, conv3d, group_norm, layer_norm
from polyreme.nn.layer import Layer
from polyreme.nn.lazy import LazyGuard
from polyreme.nn.parameter import ParamAttr, Parameter
from polyreme.nn.summary import summary
from polyreme.ops.by_dim import softmax
from polyreme.program.mode import disable_static, enable_static, in_dynamic_mode
from polyreme.torch_scripts import disable_compat, enable_compat

dtype = np.dtype
"""The class of every dtype: `x.dtype == paddle.float32`, `isinstance(x.dtype, paddle.dtype)`."""

cdouble: np.dtype[Any] = complex128
cfloat: np.dtype[Any] = complex64
double: np.dtype[Any] = float64
float: np.dtype[Any] = float32
half: np.dtype[Any] = float16

e: builtins.float = math.e
pi: builtins.float = math.pi
inf: builtins.float = math.inf
nan: builtins.float = math.nan
newaxis: None = None

manual_seed = seed
get_autocast_cpu_dtype = get_autocast_gpu_dtype = get_autocast_dtype


def get_cuda_rng_state() -> list[np.ndarray]:
    """A state for each GPU: get_rng_state's, as one generator serves all devices."""
    return get_rng_state() * gpu_count()


def set_cuda_rng_state(state_list: list[np.ndarray]) -> None:
    """Go on from what get_cuda_rng_state gave. Raises ConfigError for another number of states than GPUs."""
    if len(state_list) != gpu_count():
        raise ConfigError(f"set_cuda_rng_state: {len(state_list)} states for {gpu_count()} GPUs")
    set_rng_state(state_list[:1] or get_rng_state())


def cast_(x: Tensor, dtype: Any) -> Tensor:
    """The value in another dtype, in place."""
    return x.cast_(dtype)


def asarray(
    obj: Any,
    dtype: Any = None,
    device: Any = None,
    copy: builtins.bool | None = None,
    requires_grad: builtins.bool = False,
) -> Tensor:
    """A Tensor with a copy of a number, nested lists, an ndarray or a Tensor, that wants a gradient if requires_grad.

    copy=False gives a Tensor that fits as it is, outside the tape. Raises ConfigError for copy=False of anything else.
    """
    if copy is False:
        if not (isinstance(obj, Tensor) and device is None and dtype in (None, obj.dtype)):
            raise ConfigError(f"asarray: copy=False of {type(obj).__name__}; memory is not shared here, leave copy out")
        obj = obj.detach()
        obj.stop_gradient = not requires_grad
        return obj
    return to_tensor(obj, dtype, device, not requires_grad)


def autocast(
    device_type: Any, dtype: Any = "float16", enabled: builtins.bool = True, cache_enabled: builtins.bool = True
) -> AbstractContextManager[None]:
    """amp.auto_cast for a device type; the casts are the same on every one, and compiled programs need no cache."""
    return auto_cast(enable=enabled, dtype=dtype)


def check_shape(
    shape: Any,
    op_name: str,
    expected_shape_type: Any = (list, tuple, Tensor),
    expected_element_type: Any = (int, Tensor),
    expected_tensor_dtype: Sequence[str] = ("int32", "int64"),
) -> None:
    """Raise TypeError unless shape and its elements are of the types; DTypeError for Tensors of another dtype."""
    if not isinstance(shape, expected_shape_type):
        raise TypeError(f"{op_name}: a shape is a list or tuple of sizes, or a Tensor, got {type(shape).__name__}")
    sizes = [shape] if isinstance(shape, Tensor) else list(shape)
    for size in sizes:
        if not isinstance(size, Tensor) and not isinstance(size, expected_element_type):
            raise TypeError(f"{op_name}: {size!r} in a shape is a {type(size).__name__}, needs an integer")
        if isinstance(size, Tensor) and size.dtype.name not in expected_tensor_dtype:
            raise DTypeError(f"{op_name}: a shape in {size.dtype.name}; needs {' or '.join(expected_tensor_dtype)}")


def disable_signal_handler() -> None:
    """Nothing to undo: importing polyreme installs no signal handlers."""


def as_tensor(
    data: Any,
    dtype: Any = None,
    device: Any = None,
    requires_grad: builtins.bool = False,
    pin_memory: builtins.bool = False,
) -> Tensor:
    """to_tensor, but a Tensor that already fits is returned as it is; the rest as creation functions take it."""
    if pin_memory:
        raise ConfigError("as_tensor: pin_memory=True; transfers pin memory themselves here, leave it out")
    fits = isinstance(data, Tensor) and device is None and (dtype is None or as_dtype(dtype) == data.dtype)
    if fits and not (requires_grad and data.stop_gradient):
        return data
    return to_tensor(data, dtype, device, not requires_grad)


def from_numpy(ndarray: np.ndarray) -> Tensor:
    """A Tensor with a copy of an ndarray."""
    if not isinstance(ndarray, np.ndarray):
        raise TypeError(f"from_numpy takes an ndarray, got {type(ndarray).__name__}; to_tensor takes anything")
    return to_tensor(ndarray)


def create_parameter(
    shape: list[int],
    dtype: Any,
    name: str | None = None,
    attr: Any = None,
    is_bias: builtins.bool = False,
    default_initializer: Any = None,
) -> Parameter:
    """A Parameter that belongs to no Layer: Xavier-uniform values by default, zeros for a bias."""
    wanted = ParamAttr.of(attr)
    if wanted is not None and name is not None:
        wanted = replace(wanted, name=name)
    return Layer("create_parameter", dtype).create_parameter(
        shape, False if wanted is None else wanted, dtype, is_bias, default_initializer
    )


def set_printoptions(
    precision: int | None = None,
    threshold: int | None = None,
    edgeitems: int | None = None,
    sci_mode: builtins.bool | None = None,
    linewidth: int | None = None,
) -> None:
    """How Tensors print: digits, elements before `...`, elements at each end, scientific or not, line width."""
    given = {"precision": precision, "threshold": threshold, "edgeitems": edgeitems, "linewidth": linewidth}
    print_options.update({k: v for k, v in given.items() if v is not None})
    if sci_mode is not None:
        print_options["suppress"] = not sci_mode


__all__ = [
    "BFloat16Tensor",
    "BoolTensor",
    "ByteTensor",
    "CPUPlace",
    "CUDAPinnedPlace",
    "CUDAPlace",
    "CharTensor",
    "CustomPlace",
    "DoubleTensor",
    "FloatTensor",
    "Generator",
    "HalfTensor",
    "IntTensor",
    "LazyGuard",
    "LongTensor",
    "MmapStorage",
    "ParamAttr",
    "ShortTensor",
    "Size",
    "Tensor",
    "adaptive_avg_pool1d",
    "as_tensor",
    "asarray",
    "autocast",
    "bfloat16",
    "bool",
    "cast_",
    "cdouble",
    "cfloat",
    "check_shape",
    "complex64",
    "complex128",
    "conv1d",
    "conv2d",
    "conv3d",
    "create_parameter",
    "disable_compat",
    "disable_signal_handler",
    "disable_static",
    "double",
    "dtype",
    "e",
    "enable_compat",
    "enable_grad",
    "enable_static",
    "finfo",
    "float",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "float32",
    "float64",
    "flops",
    "from_dlpack",
    "from_numpy",
    "get_autocast_cpu_dtype",
    "get_autocast_dtype",
    "get_autocast_gpu_dtype",
    "get_cuda_rng_state",
    "get_default_dtype",
    "get_device",
    "get_flags",
    "get_rng_state",
    "grad",
    "group_norm",
    "half",
    "iinfo",
    "in_dynamic_mode",
    "inf",
    "int8",
    "int16",
    "int32",
    "int64",
    "is_autocast_enabled",
    "is_compiled_with_cuda",
    "is_grad_enabled",
    "layer_norm",
    "load",
    "manual_seed",
    "nan",
    "newaxis",
    "no_grad",
    "pi",
    "save",
    "seed",
    "set_cuda_rng_state",
    "set_default_dtype",
    "set_device",
    "set_flags",
    "set_grad_enabled",
    "set_printoptions",
    "set_rng_state",
    "softmax",
    "summary",
    "to_dlpack",
    "to_tensor",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]
