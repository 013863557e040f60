"""Weights of few bits and products with them, and numbers rounded to a grid as if they were stored in few bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from polyreme import kernels
from polyreme.core import dtype as dtypes
from polyreme.core.annotations import DTypeLike
from polyreme.core.op import op
from polyreme.errors import ConfigError, DTypeError, ShapeError, did_you_mean
from polyreme.kernels import low_bit

ALGORITHMS = {"weight_only_int8": "int8", "weight_only_int4": "int4", "llm.int8": "int8"}
"""What weight_quantize calls a kind of codes."""
_ARCHITECTURES = (None, 70, 75, 80, 86, 89, 90, 100)


def _kind_of(algo: str, what: str) -> str:
    kind = ALGORITHMS.get(algo)
    if kind is None and algo in low_bit.LARGEST:
        kind = algo
    if kind is None:
        raise ConfigError(f"{what}: unknown algo {algo!r}{did_you_mean(algo, [*ALGORITHMS, *low_bit.LARGEST])}")
    return kind


def _check_group(group_size: int, what: str) -> None:
    if group_size != -1 and not (isinstance(group_size, int) and group_size > 0):
        raise ConfigError(f"{what}: group_size={group_size!r}; give a number of inputs, or -1 for all of them")


def _check_arch(arch: int | None, what: str) -> None:
    if arch not in _ARCHITECTURES:
        known = ", ".join(map(str, _ARCHITECTURES[1:]))
        raise ConfigError(f"{what}: arch={arch!r}; leave it out, or give one of {known}")


@op(method=False)
def weight_quantize(
    x: Array, algo: str = "weight_only_int8", arch: int | None = None, group_size: int = -1
) -> tuple[Array, Array]:
    """Codes and scales of a weight: [in, out] -> [out, in], of 4 bits two in a byte [out / 2, in], and [out].

    algo: weight_only_int8, weight_only_int4, llm.int8, or a kind of codes (int8, int4, nf4, fp8). group_size: inputs
    that share a scale, [in / group_size rounded up, out] then; all of a channel if -1. Scales are of x's dtype, float32
    of llm.int8. Codes lie in order whatever arch, the compute capability that PaddlePaddle mixes them for. Raises
    ConfigError for another algo, arch or group_size, ShapeError for what is no matrix or has no pairs of channels.
    """
    kind = _kind_of(algo, "weight_quantize")
    _check_arch(arch, "weight_quantize")
    _check_group(group_size, "weight_quantize")
    if x.ndim != 2 or not dtypes.is_floating(x.dtype):
        raise ShapeError(f"weight_quantize: x is {x.dtype.name} {list(x.shape)}; give a floating weight [in, out]")
    if kind in low_bit.HALVES and x.shape[1] % 2:
        raise ShapeError(f"weight_quantize: {x.shape[1]} channels; {algo} stores two in a byte, make them even")
    codes, scale = low_bit.encode(x, kind, group_size)
    return codes, scale if algo == "llm.int8" else scale.astype(x.dtype)


@op(method=False)
def weight_dequantize(
    x: Array, scale: Array, algo: str = "weight_only_int8", out_dtype: DTypeLike = "float16", group_size: int = -1
) -> Array:
    """The weight [in, out] that weight_quantize's codes and scales say, in out_dtype; of several, with one dim more in
    front of codes and scales, [n, in, out]. Raises as weight_only_linear."""
    kind, dtype = _kind_of(algo, "weight_dequantize"), dtypes.as_dtype(out_dtype)
    if x.ndim == 3 and scale.ndim > 1 and scale.shape[0] == x.shape[0] > 0:
        _check_stored(x[0], scale[0], kind, group_size, "weight_dequantize")
        return jax.vmap(lambda codes, each: low_bit.decode(codes, each, kind, group_size, dtype).T)(x, scale)
    _check_stored(x, scale, kind, group_size, "weight_dequantize")
    return low_bit.decode(x, scale, kind, group_size, dtype).T


@op(amp="low", method=False, uncast=("weight_scale",))
def weight_only_linear(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    weight_scale: Array | None = None,
    weight_dtype: str = "int8",
    arch: int | None = None,
    group_size: int = -1,
) -> Array:
    """x times a weight of weight_quantize, decoded inside the product, plus bias: [*b, in] -> [*b, out], of x's dtype.

    weight_dtype: int8, int4, nf4 or fp8. Raises ConfigError for another one and without scales, ShapeError and
    DTypeError for codes and scales that do not fit.
    """
    if weight_dtype not in low_bit.LARGEST:
        known = did_you_mean(str(weight_dtype), low_bit.LARGEST)
        raise ConfigError(f"weight_only_linear: unknown weight_dtype {weight_dtype!r}{known}")
    _check_arch(arch, "weight_only_linear")
    y = kernels.low_bit_linear(
        x,
        weight,
        _check_stored(weight, weight_scale, weight_dtype, group_size, "weight_only_linear", x),
        weight_dtype,
        group_size,
    )
    return y if bias is None else y + bias.astype(y.dtype)


@op(amp="low", method=False, uncast=("weight_scale",))
def llm_int8_linear(
    x: Array, weight: Array, bias: Array | None = None, weight_scale: Array | None = None, threshold: float = 6.0
) -> Array:
    """x times an int8 weight [out, in] -> [*b, out]; what x has above threshold is multiplied as it is, the rest in
    int8, each row rounded by its own scale.

    Inputs of which any row has a number above threshold are taken as they are in all rows. Source: arXiv:2208.07339,
    section 3. Raises as weight_only_linear.
    """
    scale = _check_stored(weight, weight_scale, "int8", -1, "llm_int8_linear", x)
    wide = jnp.abs(x).max(tuple(range(x.ndim - 1))) > threshold
    plain = kernels.low_bit_linear(jnp.where(wide, x, 0), weight, scale, "int8", -1)
    y = plain + rows_in_int8(jnp.where(wide, 0, x), weight, scale)
    return y if bias is None else y + bias.astype(y.dtype)


@op(amp="low", method=False, uncast=("weight_scale",))
def low_bit_product(x: Array, weight: Array, weight_scale: Array, weight_dtype: str = "int8") -> Array:
    """x [*b, in] rounded row by row to weight_dtype, int8 or fp8, times a weight [out, in] of it with a scale for each
    channel -> [*b, out], of x's dtype. The gradient is that of x not rounded.

    Raises ConfigError for another weight_dtype, ShapeError and DTypeError as weight_only_linear.
    """
    if weight_dtype not in ("int8", "fp8"):
        raise ConfigError(f"low_bit_product: weight_dtype={weight_dtype!r}; activations are int8 or fp8")
    _check_stored(weight, weight_scale, weight_dtype, -1, "low_bit_product", x)
    rounded = rows_in_int8 if weight_dtype == "int8" else _rows_in_fp8
    exact = kernels.low_bit_linear(x, weight, weight_scale, weight_dtype, -1)
    return exact + jax.lax.stop_gradient(rounded(x, weight, weight_scale) - exact)


@op(method=False)
def apply_per_channel_scale(x: Array, scales: Array) -> Array:
    """x times a number for each of its last dim, in x's dtype: [*b, n], [n] -> [*b, n]."""
    return x * scales.astype(x.dtype)


@op(method=False)
def fake_quantize(x: Array, scale: Array, bit_length: int = 8, quant_axis: int = -1) -> Array:
    """x rounded to bit_length bits and back, of x's dtype: the nearest of scale * n / (2^(bit_length - 1) - 1), |n| at
    most that many. A NaN stays one, and a scale of 0 gives 0.

    scale: one number, one for each of x along quant_axis, or [groups, out] for groups of a matrix's rows. The gradient
    of x is that of the result, whatever was cut
    off: rounding has none of its own. Source: arXiv:1308.3432. Raises ConfigError for another bit_length.
    """
    _check_bits(bit_length, "fake_quantize")
    step = _along(scale, x, quant_axis).astype(jnp.float32) / _largest_code(bit_length)
    rounded = _clipped(x, step, bit_length) * step
    return x + jax.lax.stop_gradient(rounded.astype(x.dtype) - x)


@op(method=False)
def quantize_linear(x: Array, scale: Array, zero_point: Array, bit_length: int = 8, quant_axis: int = -1) -> Array:
    """Whole numbers, of x's dtype: round(x (2^(bit_length - 1) - 1) / scale) + zero_point, cut off at bit_length bits.

    scale, zero_point: as of fake_quantize. The gradient of x passes the rounding by.
    """
    _check_bits(bit_length, "quantize_linear")
    step = _along(scale, x, quant_axis).astype(jnp.float32) / _largest_code(bit_length)
    scaled = x.astype(jnp.float32) / jnp.where(step == 0, 1, step)
    shifted = jnp.round(scaled) + _along(zero_point, x, quant_axis).astype(jnp.float32)
    codes = jnp.clip(shifted, -_largest_code(bit_length) - 1, _largest_code(bit_length))
    return (scaled + jax.lax.stop_gradient(codes - scaled)).astype(x.dtype)


@op(method=False)
def dequantize_linear(x: Array, scale: Array, zero_point: Array, bit_length: int = 8, quant_axis: int = -1) -> Array:
    """The inverse of quantize_linear: (x - zero_point) scale / (2^(bit_length - 1) - 1), of scale's dtype."""
    _check_bits(bit_length, "dequantize_linear")
    step = _along(scale, x, quant_axis) / _largest_code(bit_length)
    return (x.astype(scale.dtype) - _along(zero_point, x, quant_axis).astype(scale.dtype)) * step


def rows_in_int8(x: Array, weight: Array, scale: Array) -> Array:
    """x [*b, in] times int8 [out, in], each row of x in int8 too; sums of products are whole numbers, in int32."""
    top = jnp.abs(x.astype(jnp.float32)).max(-1, keepdims=True)
    step = jnp.where(top == 0, 1, top / 127)
    codes = jnp.round(x.astype(jnp.float32) / step).astype(jnp.int8)
    whole = jax.lax.dot_general(codes, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    return (whole.astype(jnp.float32) * step * scale).astype(x.dtype)


def _rows_in_fp8(x: Array, weight: Array, scale: Array) -> Array:
    top = jnp.abs(x.astype(jnp.float32)).max(-1, keepdims=True)
    step = jnp.where(top == 0, 1, top / low_bit.LARGEST["fp8"])
    codes = (x.astype(jnp.float32) / step).astype(jnp.float8_e4m3fn)
    sums = jnp.matmul(codes.astype(jnp.float32), low_bit.levels(weight, "fp8", jnp.float32).T)
    return (sums * step * scale).astype(x.dtype)


def _check_stored(
    codes: Array, scale: Array | None, kind: str, group_size: int, what: str, x: Array | None = None
) -> Array:
    """scale, if it and the codes fit together and x."""
    _check_group(group_size, what)
    if scale is None:
        raise ConfigError(f"{what}: no weight_scale; give the scales of weight_quantize")
    if codes.dtype != jnp.int8:
        raise DTypeError(f"{what}: codes of {kind} are int8, got {codes.dtype.name}")
    for name, array in (("scales", scale), ("x", x)):
        if array is not None and not dtypes.is_floating(array.dtype):
            raise DTypeError(f"{what}: {name} of {array.dtype.name}; give floating numbers")
    if codes.ndim != 2 or (x is not None and x.shape[-1:] != codes.shape[1:]):
        beside = "" if x is None else f" for x {list(x.shape)}"
        raise ShapeError(f"{what}: weight {list(codes.shape)}{beside}; it is [out, in], and [out / 2, in] of 4 bits")
    outputs = codes.shape[0] * (2 if kind in low_bit.HALVES else 1)
    wanted = (outputs,) if group_size == -1 else (-(-codes.shape[1] // group_size), outputs)
    if scale.shape != wanted:
        raise ShapeError(
            f"{what}: scales {list(scale.shape)} for codes {list(codes.shape)} of {kind} in groups of {group_size}; "
            f"they are {list(wanted)}"
        )
    return scale


def _check_bits(bit_length: int, what: str) -> None:
    if not isinstance(bit_length, int) or not 2 <= bit_length <= 16:
        raise ConfigError(f"{what}: bit_length={bit_length!r}; give 2 to 16")


def _largest_code(bit_length: int) -> int:
    return 2 ** (bit_length - 1) - 1


def _clipped(x: Array, step: Array, bit_length: int) -> Array:
    scaled = x.astype(jnp.float32) / jnp.where(step == 0, 1, step)
    return jnp.clip(jnp.round(scaled), -_largest_code(bit_length), _largest_code(bit_length))


def _along(scale: Array, x: Array, quant_axis: int) -> Array:
    """scale in the shape that broadcasts along a dim of x; of x [in, out] also [groups of inputs, out]."""
    if scale.size == 1:
        return scale.reshape(())
    if scale.ndim == x.ndim == 2:
        return jnp.repeat(scale, x.shape[0] // scale.shape[0], 0)
    shape = [1] * x.ndim
    shape[quant_axis] = scale.size
    return scale.reshape(shape)


ALIASES: dict[str, str] = {}
