"""Root names that are not ops: Tensor, dtypes, devices, modes, seeds, saving, and the high-level entry points.

Floor: 7.
"""

from polyreme.core.dtype import (
    bfloat16,
    complex64,
    complex128,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
    float64,
    get_default_dtype,
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
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.io.serialization import load, save
from polyreme.nn.parameter import ParamAttr

__all__ = [
    "CPUPlace",
    "CUDAPlace",
    "CustomPlace",
    "Generator",
    "ParamAttr",
    "Tensor",
    "bfloat16",
    "bool",
    "complex64",
    "complex128",
    "enable_grad",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "float32",
    "float64",
    "get_default_dtype",
    "get_device",
    "get_rng_state",
    "int8",
    "int16",
    "int32",
    "int64",
    "is_compiled_with_cuda",
    "is_grad_enabled",
    "load",
    "no_grad",
    "save",
    "seed",
    "set_default_dtype",
    "set_device",
    "set_grad_enabled",
    "set_rng_state",
    "to_tensor",
    "uint8",
]
