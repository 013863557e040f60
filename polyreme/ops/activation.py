"""Activation functions: elementwise ones, gated ones, and the softmax family.

Half-precision inputs are computed in float32 inside and come back in their own dtype; integers become the
default floating dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core.annotations import AnyTensor, DTypeLike
from polyreme.core.dtype import floating, promote_floating
from polyreme.core.op import DRAWN, Key, composite, op
from polyreme.core.sharding_rule import OpCall, ShardingRule
from polyreme.errors import ConfigError, ShapeError
from polyreme.kernels import select
from polyreme.ops.creation import republish
from polyreme.ops.sharding import along_axis, along_last, dim_names, elementwise, unnamed


def wide(x: Array) -> Array:
    """x as a floating array of at least float32: what a formula is computed in."""
    x = floating(x)
    return x.astype(jnp.promote_types(x.dtype, dtypes.float32))


def _wide_inside(fn: Callable[..., Array], *inputs: Array) -> Array:
    """fn of floating arrays of one dtype, as wide(), in that dtype.

    On a GPU the derivative of a half-precision one begins at the inputs again: XLA else keeps what the forward has in
    float32, such as a GELU's tanh, twice the bytes of the inputs, and memory is what an elementwise op waits for.
    """

    def narrow(*arrays: Array) -> Array:
        return fn(*map(wide, arrays)).astype(arrays[0].dtype)

    inputs = tuple(map(floating, inputs))
    begins_again = select.backend() == "gpu" and inputs[0].dtype.itemsize < 4
    return (jax.checkpoint(narrow) if begins_again else narrow)(*inputs)


def positive_dim(axis: int, ndim: int, what: str) -> int:
    """axis counted from the front. Raises ShapeError when it is out of range."""
    if not -ndim <= axis < ndim:
        raise ShapeError(f"{what}: axis={axis} of a Tensor with {ndim} dims; needs {-ndim} <= axis < {ndim}")
    return axis % ndim


def channel_dim(data_format: str, ndim: int, what: str) -> int:
    """The dim of the channels: the last for formats that end in C ("NHWC"), else 1 (0 of a 1-D Tensor).

    Raises ConfigError for a format that is neither.
    """
    if data_format not in ("NC", "NCL", "NCHW", "NCDHW", "NLC", "NHWC", "NDHWC"):
        raise ConfigError(f"{what}: data_format={data_format!r}; choose NCL, NCHW, NCDHW, NLC, NHWC or NDHWC")
    return ndim - 1 if data_format.endswith("C") and data_format != "NC" else min(1, ndim - 1)


@op(method=False, inplace=True, rule=elementwise, real=True)
def relu(x: Array) -> Array:
    """max(x, 0), elementwise; the gradient at 0 is 0."""
    return jax.nn.relu(x)


@op(method=False, rule=elementwise, real=True)
def relu6(x: Array) -> Array:
    """min(max(x, 0), 6), elementwise; the gradient at 0 and 6 is 0."""
    return jax.nn.relu6(x)


def _at_most_0(x: Array) -> Array:
    """min(x, 0), whose gradient at 0 is 1: jnp.minimum halves it."""
    return jnp.where(x > 0, jnp.zeros((), x.dtype), x)


@op(method=False, inplace=True, rule=elementwise, real=True)
def elu(x: Array, alpha: float = 1.0) -> Array:
    """x where x > 0, else alpha * (e^x - 1). Source: arXiv:1511.07289."""
    return _wide_inside(lambda v: jnp.where(v > 0, v, alpha * jnp.expm1(_at_most_0(v))), x)


@op(method=False, rule=elementwise, real=True)
def selu(x: Array, scale: float = 1.0507009873554805, alpha: float = 1.6732632423543772) -> Array:
    """scale * (x where x > 0, else alpha * (e^x - 1)). Source: arXiv:1706.02515.

    Raises ConfigError unless scale > 1 and alpha >= 0.
    """
    if scale <= 1.0 or alpha < 0:
        raise ConfigError(f"selu: scale={scale}, alpha={alpha}; needs scale > 1 and alpha >= 0")
    return _wide_inside(lambda v: scale * jnp.where(v > 0, v, alpha * jnp.expm1(_at_most_0(v))), x)


@op(method=False, rule=elementwise, real=True)
def celu(x: Array, alpha: float = 1.0) -> Array:
    """max(x, 0) + min(0, alpha * (e^(x / alpha) - 1)). Source: arXiv:1704.07483. Raises ConfigError for alpha = 0."""
    if alpha == 0:
        raise ConfigError("celu: alpha=0 divides by zero; give another")
    return _wide_inside(lambda v: jnp.where(v > 0, v, alpha * jnp.expm1(_at_most_0(v) / alpha)), x)


@op(method=False, rule=elementwise)
def gelu(x: Array, approximate: bool | str = False) -> Array:
    """x * Phi(x), Phi the normal distribution function. Source: arXiv:1606.08415.

    approximate (True, or "tanh"): x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).
    """
    if approximate not in (True, False, "tanh", "none"):
        raise ConfigError(f"gelu: approximate={approximate!r}; choose True or False")
    return _wide_inside(lambda v: jax.nn.gelu(v, approximate=approximate in (True, "tanh")), x)


def _with_inplace_flag(declared: Callable[..., Any]) -> Callable[..., Any]:
    """An op of one Tensor whose public function also takes inplace: write the result into x."""

    def public(x: Any, inplace: bool = False, name: str | None = None, out: Any = None) -> Any:
        target = x if inplace else out
        return declared(x) if target is None else declared(x, out=target)

    return republish(declared, public)


@_with_inplace_flag
@op(method=False, rule=elementwise)
def silu(x: Array) -> Array:
    """x * sigmoid(x), elementwise; inplace=True writes it into x. Source: arXiv:1702.03118."""
    return _wide_inside(jax.nn.silu, x)


@op(method=False, rule=elementwise, real=True)
def mish(x: Array) -> Array:
    """x * tanh(softplus(x)). Source: arXiv:1908.08681."""
    return _wide_inside(lambda v: v * jnp.tanh(jax.nn.softplus(v)), x)


@op(method=False, rule=elementwise, real=True)
def hardsigmoid(x: Array, slope: float = 0.1666667, offset: float = 0.5) -> Array:
    """slope * x + offset kept between 0 and 1; the gradient is 0 outside."""
    x = floating(x)
    line = slope * x + offset
    return jnp.where(line <= 0, jnp.zeros_like(x), jnp.where(line >= 1, jnp.ones_like(x), line))


@op(method=False, rule=elementwise)
def hardswish(x: Array) -> Array:
    """x * min(max(x + 3, 0), 6) / 6. Source: arXiv:1905.02244."""
    x = floating(x)
    return jnp.where(x <= -3, jnp.zeros_like(x), jnp.where(x >= 3, x, x * (x + 3) / 6))


@op(method=False, inplace=True, rule=elementwise, real=True)
def hardtanh(x: Array, min: float = -1.0, max: float = 1.0) -> Array:
    """x kept between min and max; the gradient is 0 outside. Raises ConfigError unless min < max."""
    if not min < max:  # NaN is below nothing
        raise ConfigError(f"hardtanh: min={min}, max={max}; needs min < max")
    x = floating(x)
    low, high = jnp.asarray(min, x.dtype), jnp.asarray(max, x.dtype)
    return jnp.where(x <= low, low, jnp.where(x >= high, high, x))


def _threshold(threshold: float, what: str) -> float:
    if threshold < 0:
        raise ConfigError(f"{what}: threshold={threshold}; it must not be negative")
    return threshold


@op(method=False, rule=elementwise, real=True)
def hardshrink(x: Array, threshold: float = 0.5) -> Array:
    """x where |x| > threshold, else 0."""
    x = floating(x)
    return jnp.where(jnp.abs(x) <= threshold, jnp.zeros_like(x), x)


@op(method=False, rule=elementwise, real=True)
def softshrink(x: Array, threshold: float = 0.5) -> Array:
    """x moved toward 0 by threshold, and 0 within it. Raises ConfigError for a negative threshold."""
    x = floating(x)
    limit = _threshold(threshold, "softshrink")
    return jnp.where(jnp.abs(x) <= limit, jnp.zeros_like(x), x - limit * jnp.sign(x))


@op(method=False, rule=elementwise)
def tanhshrink(x: Array) -> Array:
    """x - tanh(x)."""
    return _wide_inside(lambda v: v - jnp.tanh(v), x)


@op(method=False, inplace=True, rule=elementwise, real=True)
def thresholded_relu(x: Array, threshold: float = 1.0, value: float = 0.0) -> Array:
    """x where x > threshold, else value."""
    x = floating(x)
    return jnp.where(x <= threshold, jnp.asarray(value, x.dtype), x)


@op(method=False, rule=elementwise)
def softplus(x: Array, beta: float = 1, threshold: float = 20) -> Array:
    """log(1 + e^(beta x)) / beta, and x itself where beta * x > threshold. Raises ConfigError for a beta of 0."""
    if beta == 0:
        raise ConfigError(f"softplus: beta={beta} divides by zero; give another number")
    return _wide_inside(lambda v: jnp.where(beta * v > threshold, v, jax.nn.softplus(beta * v) / beta), x)


@op(method=False, rule=elementwise)
def softsign(x: Array) -> Array:
    """x / (1 + |x|)."""
    return jax.nn.soft_sign(floating(x))


@op(method=False, inplace=True, rule=elementwise, real=True)
def leaky_relu(x: Array, negative_slope: float = 0.01) -> Array:
    """x where x >= 0, else negative_slope * x; the gradient at 0 is 1."""
    x = floating(x)
    return jnp.where(x >= 0, x, negative_slope * x)


def _prelu_rule(call: OpCall) -> ShardingRule:
    """The weight, one number or one per channel, is whole."""
    names = dim_names(call.shapes[0])
    return ShardingRule((names, *unnamed(call.shapes[1:])), (names,), piecewise=True)


def _swiglu_rule(call: OpCall) -> ShardingRule | None:
    """Rule of swiglu: elementwise for two inputs; for the halves of one, every dim but the last goes through."""
    return elementwise(call) if len(call.shapes) == 2 else along_last(call)


@op(method=False, rule=_prelu_rule, real=True)
def prelu(x: Array, weight: Array, data_format: str = "NCHW") -> Array:
    """x where x > 0, else weight * x; weight is [], [1] or one slope a channel, [C]. Source: arXiv:1502.01852.

    Raises ShapeError for another shape of weight.
    """
    x, weight = promote_floating(x, weight)
    if weight.size == 1 and weight.ndim <= 1:
        slope = weight.reshape(())
    else:
        dim = channel_dim(data_format, x.ndim, "prelu")
        if weight.ndim != 1 or x.ndim < 2 or weight.size != x.shape[dim]:
            raise ShapeError(f"prelu: weight {list(weight.shape)} for x {list(x.shape)}; needs [1] or [channels]")
        slope = weight.reshape([-1 if d == dim else 1 for d in range(x.ndim)])
    return jnp.where(x > 0, x, slope * x)


@op(method=False, rule=elementwise)
def rrelu_train(x: Array, lower: float, upper: float, key: Key = DRAWN) -> Array:
    """x where x >= 0, else x times a slope drawn uniformly from [lower, upper), one for each element."""
    x = floating(x)
    slope = jax.random.uniform(key, x.shape, jnp.promote_types(x.dtype, dtypes.float32), lower, upper)
    return jnp.where(x >= 0, x, slope.astype(x.dtype) * x)


@composite(method=False)
def rrelu(
    x: AnyTensor,
    lower: float = 0.125,
    upper: float = 0.3333333333333333,
    training: bool = True,
    name: str | None = None,
) -> AnyTensor:
    """leaky_relu with a random slope from [lower, upper) in training, and their mean otherwise.

    Source: arXiv:1505.00853. Raises ConfigError unless 0 <= lower <= upper <= 1.
    """
    if not 0 <= lower <= upper <= 1:
        raise ConfigError(f"rrelu: lower={lower}, upper={upper}; needs 0 <= lower <= upper <= 1")
    if training and lower < upper:
        return rrelu_train(x, lower, upper)
    return leaky_relu(x, (lower + upper) / 2)


@op(method=False, rule=elementwise)
def log_sigmoid(x: Array) -> Array:
    """log(1 / (1 + e^-x)), without overflow."""
    return _wide_inside(jax.nn.log_sigmoid, x)


@op(method=False, rule=along_axis(), real=True)
def maxout(x: Array, groups: int, axis: int = 1) -> Array:
    """Largest of each `groups` neighbours along axis, whose size it divides. Source: arXiv:1302.4389.

    Raises ShapeError when it does not divide.
    """
    dim = positive_dim(axis, x.ndim, "maxout")
    if groups < 1 or x.shape[dim] % groups:
        raise ShapeError(f"maxout: groups={groups} does not divide dim {dim} of {list(x.shape)}")
    split = x.reshape(*x.shape[:dim], x.shape[dim] // groups, groups, *x.shape[dim + 1 :])
    return jnp.max(split, dim + 1)


def _halves(x: Array, axis: int, what: str) -> tuple[Array, Array]:
    dim = positive_dim(axis, x.ndim, what)
    if x.shape[dim] % 2:
        raise ShapeError(f"{what}: dim {dim} of {list(x.shape)} is odd; it is split into two halves")
    first, second = jnp.split(x, 2, dim)
    return first, second


@op(method=False, rule=along_axis())
def glu(x: Array, axis: int = -1) -> Array:
    """a * sigmoid(b), a and b the halves of x along axis. Source: arXiv:1612.08083.

    Raises ShapeError for an odd size.
    """
    a, b = _halves(floating(x), axis, "glu")
    return a * _wide_inside(jax.nn.sigmoid, b)


@op(method=False, rule=_swiglu_rule)
def swiglu(x: Array, y: Array | None = None) -> Array:
    """silu(x) * y; with one Tensor x and y are its halves along the last dim. Source: arXiv:2002.05202.

    Raises ShapeError for an odd last dim, or for x and y of different shapes.
    """
    a, b = _halves(floating(x), -1, "swiglu") if y is None else promote_floating(x, y)
    if a.shape != b.shape:
        raise ShapeError(f"swiglu: x {list(a.shape)} and y {list(b.shape)} need the same shape")
    return _wide_inside(lambda a, b: jax.nn.silu(a) * b, a, b)


def _as(x: Array, dtype: Any) -> Array:
    return floating(x) if dtype is None else x.astype(dtypes.as_dtype(dtype))


@op(amp="fp32", inplace=True, rule=along_axis(default=-1))
def softmax(x: Array, axis: int = -1, dtype: DTypeLike | None = None) -> Array:
    """e^x / sum of e^x along axis, computed without overflow; x is cast to dtype first if one is given."""
    x = _as(x, dtype)
    dim = None if x.ndim == 0 else positive_dim(axis, x.ndim, "softmax")
    return _wide_inside(lambda v: jax.nn.softmax(v, () if dim is None else dim), x)


@op(amp="fp32", method=False, rule=along_axis(default=-1))
def log_softmax(x: Array, axis: int = -1, dtype: DTypeLike | None = None) -> Array:
    """log of softmax along axis, computed without overflow; x is cast to dtype first if one is given."""
    x = _as(x, dtype)
    dim = None if x.ndim == 0 else positive_dim(axis, x.ndim, "log_softmax")
    return _wide_inside(lambda v: jax.nn.log_softmax(v, () if dim is None else dim), x)


@op(amp="fp32", method=False, rule=along_axis())
def gumbel_softmax(x: Array, temperature: float = 1.0, hard: bool = False, axis: int = -1, key: Key = DRAWN) -> Array:
    """softmax((x + g) / temperature) along axis, g Gumbel noise. Source: arXiv:1611.01144.

    hard: a one-hot of its largest entry, with the gradient of the soft form. Raises ConfigError unless temperature > 0.
    """
    if temperature <= 0:
        raise ConfigError(f"gumbel_softmax: temperature={temperature}; it must be positive")
    dim = positive_dim(axis, x.ndim or 1, "gumbel_softmax")
    dtype = floating(x).dtype
    v = wide(x) if x.ndim else wide(x)[None]
    soft = jax.nn.softmax((v + jax.random.gumbel(key, v.shape, v.dtype)) / temperature, dim)
    if hard and soft.size:
        one = jax.nn.one_hot(jnp.argmax(soft, dim), soft.shape[dim], dtype=soft.dtype, axis=dim)
        soft = jax.lax.stop_gradient(one - soft) + soft
    return soft.astype(dtype).reshape(x.shape)


ALIASES = {"swish": "silu", "logsigmoid": "log_sigmoid"}
