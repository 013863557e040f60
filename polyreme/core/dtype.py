"""Dtypes and their promotion: NumPy dtypes with Paddle's names and rules.

A dtype is a numpy.dtype, so it compares equal to its own name: `x.dtype == "float32"`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from polyreme.core.engine import backend as _backend  # noqa: F401  (configures jax before the first array)
from polyreme.errors import ConfigError, DTypeError, nearest

bool_: np.dtype[Any] = np.dtype("bool")
uint8: np.dtype[Any] = np.dtype("uint8")
uint16: np.dtype[Any] = np.dtype("uint16")
uint32: np.dtype[Any] = np.dtype("uint32")
uint64: np.dtype[Any] = np.dtype("uint64")
int8: np.dtype[Any] = np.dtype("int8")
int16: np.dtype[Any] = np.dtype("int16")
int32: np.dtype[Any] = np.dtype("int32")
int64: np.dtype[Any] = np.dtype("int64")
float16: np.dtype[Any] = np.dtype("float16")
float32: np.dtype[Any] = np.dtype("float32")
float64: np.dtype[Any] = np.dtype("float64")
complex64: np.dtype[Any] = np.dtype("complex64")
complex128: np.dtype[Any] = np.dtype("complex128")
bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
float8_e4m3fn: np.dtype[Any] = np.dtype(ml_dtypes.float8_e4m3fn)
float8_e5m2: np.dtype[Any] = np.dtype(ml_dtypes.float8_e5m2)

NAMES: dict[str, np.dtype] = {
    d.name: d
    for d in (
        bool_, uint8, uint16, uint32, uint64, int8, int16, int32, int64, float16, bfloat16, float32, float64,
        float8_e4m3fn, float8_e5m2, complex64, complex128,
    )
}  # fmt: skip
_ALIASES = {"float": float32, "double": float64, "half": float16, "int": int32, "long": int64}
_SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}  # said, and no names here
_ALLOWED = frozenset(NAMES.values())
_COMPLEX = frozenset({complex64, complex128})
_FLOATING = frozenset(d for d in _ALLOWED if jnp.issubdtype(d, jnp.floating))
INEXACT = _FLOATING | _COMPLEX


def as_dtype(dtype: Any) -> np.dtype:
    """The dtype that a name ("float32", "paddle.float32"), a numpy dtype or a Python type stands for.

    Raises DTypeError for anything else.

    >>> as_dtype("bfloat16").name
    'bfloat16'
    >>> as_dtype(float) == as_dtype("float64")
    True
    """
    if isinstance(dtype, np.dtype) and dtype in _ALLOWED:
        return dtype
    if isinstance(dtype, str):
        name = dtype.rsplit(".", 1)[-1]
        if name in NAMES:
            return NAMES[name]
        if name in _ALIASES:
            return _ALIASES[name]
    else:
        try:
            found = np.dtype(dtype)
        except TypeError:
            found = None
        if found is not None and found in _ALLOWED:
            return found
    close = nearest(_SHORT.get(dtype, dtype), [*NAMES, *_ALIASES]) if isinstance(dtype, str) else ""
    choices = f"; choose one of {', '.join(NAMES)}"
    raise DTypeError(f"{dtype!r} is not a dtype here{close or choices}")


def is_floating(dtype: np.dtype) -> bool:
    """True for float8, float16, bfloat16, float32 and float64."""
    return dtype in _FLOATING


def is_inexact(dtype: np.dtype) -> bool:
    """True for floating and complex dtypes: those that carry gradients."""
    return dtype in INEXACT


def is_complex(dtype: np.dtype) -> bool:
    """True for complex64 and complex128."""
    return dtype in _COMPLEX


def is_integer(dtype: np.dtype) -> bool:
    """True for signed and unsigned integers, not for bool."""
    return jnp.issubdtype(dtype, jnp.integer)


class _Default:
    """The dtype of floats that nobody gave one."""

    __slots__ = ("dtype",)

    def __init__(self) -> None:
        self.dtype = float32


default: _Default = _Default()


def get_default_dtype() -> str:
    """The name of the dtype of Python floats, and of integers that an op turns into floats."""
    return default.dtype.name


def set_default_dtype(d: Any) -> None:
    """Choose the default floating dtype; raises DTypeError for one that is not floating."""
    dtype = as_dtype(d)
    if not is_floating(dtype):
        raise DTypeError(f"set_default_dtype takes a floating dtype, got {dtype.name}")
    default.dtype = dtype


def default_dtype() -> np.dtype:
    """The default floating dtype, as a dtype."""
    return default.dtype


class FloatLimits(NamedTuple):
    """Limits of a floating dtype, as Python's numbers; dtype is its name."""

    bits: int
    eps: float
    min: float
    max: float
    tiny: float
    smallest_normal: float
    resolution: float
    dtype: str


class IntegerLimits(NamedTuple):
    """Limits of an integer dtype; dtype is its name."""

    bits: int
    min: int
    max: int
    dtype: str


def finfo(dtype: Any) -> FloatLimits:
    """Limits of a floating dtype.

    >>> finfo("float32").eps == 2.0**-23
    True
    """
    limits = ml_dtypes.finfo(as_dtype(dtype))
    names = ("eps", "min", "max", "tiny", "smallest_normal", "resolution")
    numbers = {name: float(getattr(limits, name)) for name in names}
    return FloatLimits(bits=limits.bits, **numbers, dtype=as_dtype(dtype).name)


def iinfo(dtype: Any) -> IntegerLimits:
    """Limits of an integer dtype."""
    limits = ml_dtypes.iinfo(as_dtype(dtype))
    return IntegerLimits(limits.bits, int(limits.min), int(limits.max), as_dtype(dtype).name)


def floating(x: Any) -> Any:
    """x itself if it is floating or complex, else x in the default dtype: what exp(int tensor) computes in."""
    x = jnp.asarray(x)
    return x if is_inexact(x.dtype) else x.astype(default.dtype)


def promote(*arrays: Any) -> tuple[Any, ...]:
    """Arrays in their common dtype by Paddle's rules.

    Integer with floating gives the floating dtype; a Python float with an integer tensor gives the default dtype, where
    NumPy would give float64; a Python scalar never widens a tensor of its own kind. bfloat16 with float16 gives
    float32.
    """
    arrays = tuple(jnp.asarray(a) for a in arrays)
    return _in(_common(arrays), arrays)


def promote_floating(*arrays: Any) -> tuple[Any, ...]:
    """Arrays in their common dtype, which is the default one when all are integers.

    A Python integer that the integers would not hold keeps its value.
    """
    arrays = tuple(jnp.asarray(a) for a in arrays)
    common = _common(arrays)
    return _in(common if is_inexact(common) else default.dtype, arrays)


def _common(arrays: tuple) -> np.dtype:
    strong = [a for a in arrays if not a.weak_type]
    common = jnp.result_type(*arrays)
    if strong:
        if is_inexact(common) and not any(is_inexact(a.dtype) for a in strong):
            common = complex64 if is_complex(common) else default.dtype
    elif is_floating(common):
        common = default.dtype
    elif is_complex(common):
        common = complex128 if default.dtype == float64 else complex64
    return common


def _in(dtype: np.dtype, arrays: tuple) -> tuple:
    return tuple(a if a.dtype == dtype and not a.weak_type else a.astype(dtype) for a in arrays)


def convert(x: Any, dtype: np.dtype) -> Any:
    """x in another dtype; complex to real keeps the real part.

    Floating to integer truncates toward zero; a NaN, and what the integers cannot hold, is the lowest of int32 or
    int64, whose lowest bits narrower integers get, as they get those of other integers: what processors do, where jax
    would give the nearest integer, and 0 for NaN.
    """
    x = jnp.asarray(x)
    if is_complex(x.dtype) and not is_complex(dtype):
        x = jnp.real(x)
    if not is_floating(x.dtype) or not is_integer(dtype):
        return x.astype(dtype)
    through = int64 if dtype.itemsize == 8 or dtype == uint32 else int32
    limit = 2.0 ** (8 * through.itemsize - 1)
    x = x.astype(jnp.promote_types(x.dtype, float32))  # a limit that float16 does not hold
    whole = jnp.where((x >= -limit) & (x < limit), x, -limit).astype(through)
    if dtype == uint64:  # whose upper half int64 does not hold
        return jnp.where((x >= limit) & (x < 2 * limit), x.astype(uint64), whole.astype(uint64))
    return whole.astype(dtype)


def not_a_number(dtype: np.dtype) -> Any:
    """The value that stands for NaN where code that cannot raise has no result: NaN, the lowest integer, of unsigned
    ones the highest, and True.
    """
    if is_inexact(dtype):
        return float("nan")
    return True if dtype == bool_ else iinfo(dtype).min or iinfo(dtype).max


def holds(dtype: np.dtype, value: Any) -> bool:
    """Whether a Python number is one of an integer dtype, its fraction aside; of other dtypes True.

    >>> holds(uint8, 255), holds(uint8, -1), holds(int32, float("nan")), holds(int8, 1.5)
    (True, False, False, True)
    """
    if not is_integer(dtype) or not isinstance(value, (int, float)):
        return True
    limits = iinfo(dtype)
    if isinstance(value, int):
        return limits.min <= value <= limits.max
    return limits.min - 1 < value < limits.max + 1


def check_holds(what: str, dtype: np.dtype, value: Any) -> None:
    """Raise ConfigError unless holds."""
    if not holds(dtype, value):
        limits = iinfo(dtype)
        raise ConfigError(
            f"{what}: {value} is no {dtype.name}, which holds {limits.min} to {limits.max}; choose a wider dtype"
        )
