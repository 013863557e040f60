"""Root names that are not ops: Tensor, dtypes, devices, modes, seeds, saving, and the high-level entry points.

Floor: 7.
"""

import builtins
from dataclasses import replace
from typing import Any

import numpy as np

from polyreme.amp import get_autocast_dtype, is_autocast_enabled
from polyreme.autograd import grad
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
)
from polyreme.core.dtype import bool_ as bool  # the public name
from polyreme.core.place import CPUPlace, CUDAPlace, CustomPlace, get_device, is_compiled_with_cuda, set_device
from polyreme.core.rng import Generator, get_rng_state, seed, set_rng_state
from polyreme.eager.mode import enable_grad, is_grad_enabled, no_grad, set_grad_enabled
from polyreme.eager.tensor import Tensor, print_options, to_tensor
from polyreme.flags import get_flags, set_flags
from polyreme.io.serialization import load, save
from polyreme.nn.functional import conv1d, conv2d, conv3d, group_norm, layer_norm, softmax
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import ParamAttr, Parameter
from polyreme.nn.summary import summary
from polyreme.program.mode import disable_static, enable_static, in_dynamic_mode

dtype = np.dtype
"""The class of every dtype: `x.dtype == paddle.float32`, `isinstance(x.dtype, paddle.dtype)`."""


def as_tensor(data: Any, dtype: Any = None, place: Any = None, stop_gradient: builtins.bool = True) -> Tensor:
    """to_tensor, but a Tensor that already fits is returned as it is."""
    fits = isinstance(data, Tensor) and place is None and (dtype is None or as_dtype(dtype) == data.dtype)
    return data if fits else to_tensor(data, dtype, place, stop_gradient)


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
    return Layer(dtype=dtype).create_parameter(
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
    "CPUPlace",
    "CUDAPlace",
    "CustomPlace",
    "Generator",
    "ParamAttr",
    "Tensor",
    "as_tensor",
    "bfloat16",
    "bool",
    "complex64",
    "complex128",
    "conv1d",
    "conv2d",
    "conv3d",
    "create_parameter",
    "disable_static",
    "dtype",
    "enable_grad",
    "enable_static",
    "finfo",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "float32",
    "float64",
    "from_numpy",
    "get_autocast_dtype",
    "get_default_dtype",
    "get_device",
    "get_flags",
    "get_rng_state",
    "grad",
    "group_norm",
    "iinfo",
    "in_dynamic_mode",
    "int8",
    "int16",
    "int32",
    "int64",
    "is_autocast_enabled",
    "is_compiled_with_cuda",
    "is_grad_enabled",
    "layer_norm",
    "load",
    "no_grad",
    "save",
    "seed",
    "set_default_dtype",
    "set_device",
    "set_flags",
    "set_grad_enabled",
    "set_printoptions",
    "set_rng_state",
    "softmax",
    "summary",
    "to_tensor",
    "uint8",
]
