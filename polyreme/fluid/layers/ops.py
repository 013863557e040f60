"""Activations and functions of one Variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyreme.fluid.layer import layer
from polyreme.nn import functional as F
from polyreme.ops import arithmetic as ar
from polyreme.ops import math as mt
from polyreme.ops.manipulation import flip
from polyreme.ops.scan import cumsum as running_sum
from polyreme.ops.special import erf as error_function


def _unary(name: str, fn: Callable[[Any], Any], formula: str) -> Callable[..., Any]:
    def run(x: Any, name: str | None = None) -> Any:
        return fn(x)

    run.__name__ = run.__qualname__ = name
    run.__doc__ = f"{formula}, element by element."
    return layer(run)


abs: Callable[..., Any] = _unary("abs", mt.abs, "|x|")
acos: Callable[..., Any] = _unary("acos", mt.acos, "arccos x")
asin: Callable[..., Any] = _unary("asin", mt.asin, "arcsin x")
atan: Callable[..., Any] = _unary("atan", mt.atan, "arctan x")
ceil: Callable[..., Any] = _unary("ceil", mt.ceil, "The next integer above or at x")
cos: Callable[..., Any] = _unary("cos", mt.cos, "cos x")
erf: Callable[..., Any] = _unary("erf", error_function, "2 / sqrt(pi) * integral of e^-t^2 from 0 to x")
exp: Callable[..., Any] = _unary("exp", mt.exp, "e^x")
floor: Callable[..., Any] = _unary("floor", mt.floor, "The next integer below or at x")
log: Callable[..., Any] = _unary("log", mt.log, "Natural logarithm of x")
logsigmoid: Callable[..., Any] = _unary("logsigmoid", F.log_sigmoid, "log(1 / (1 + e^-x))")
reciprocal: Callable[..., Any] = _unary("reciprocal", mt.reciprocal, "1 / x")
relu: Callable[..., Any] = _unary("relu", F.relu, "max(0, x)")
round: Callable[..., Any] = _unary("round", mt.round, "The nearest integer")
rsqrt: Callable[..., Any] = _unary("rsqrt", mt.rsqrt, "1 / sqrt(x)")
sigmoid: Callable[..., Any] = _unary("sigmoid", mt.sigmoid, "1 / (1 + e^-x)")
sign: Callable[..., Any] = _unary("sign", mt.sign, "-1, 0 or 1")
sin: Callable[..., Any] = _unary("sin", mt.sin, "sin x")
softplus: Callable[..., Any] = _unary("softplus", F.softplus, "log(1 + e^x)")
softsign: Callable[..., Any] = _unary("softsign", F.softsign, "x / (1 + |x|)")
sqrt: Callable[..., Any] = _unary("sqrt", mt.sqrt, "Square root of x")
square: Callable[..., Any] = _unary("square", mt.square, "x^2")
tanh: Callable[..., Any] = _unary("tanh", mt.tanh, "tanh x")
tanh_shrink: Callable[..., Any] = _unary("tanh_shrink", F.tanhshrink, "x - tanh x")


@layer
def softmax(input: Any, use_cudnn: bool = False, name: str | None = None, axis: int = -1) -> Any:
    """e^x / sum of e^x over axis."""
    return F.softmax(input, axis)


@layer
def log_softmax(input: Any, axis: int | None = None, dtype: Any = None, name: str | None = None) -> Any:
    """log(softmax(input)) over axis (-1 unless given), cast to dtype before if given. Of 1.8."""
    return F.log_softmax(input, -1 if axis is None else axis, dtype)


@layer
def gelu(x: Any, approximate: bool = False) -> Any:
    """x * P(X <= x) of the standard normal X, or its approximation by tanh. Source: arXiv:1606.08415."""
    return F.gelu(x, approximate)


@layer
def elu(x: Any, alpha: float = 1.0, name: str | None = None) -> Any:
    """x above 0, alpha * (e^x - 1) below."""
    return F.elu(x, alpha)


@layer
def selu(x: Any, scale: float | None = None, alpha: float | None = None, name: str | None = None) -> Any:
    """scale * (x above 0, alpha * (e^x - 1) below); the constants of arXiv:1706.02515 unless given."""
    settings: dict[str, Any] = {k: v for k, v in (("scale", scale), ("alpha", alpha)) if v is not None}
    return F.selu(x, **settings)


@layer
def relu6(x: Any, threshold: float = 6.0, name: str | None = None) -> Any:
    """min(max(0, x), threshold)."""
    return mt.clip(x, 0.0, threshold)


@layer
def brelu(x: Any, t_min: float = 0.0, t_max: float = 24.0, name: str | None = None) -> Any:
    """x between t_min and t_max, the nearer of them outside."""
    return mt.clip(x, t_min, t_max)


@layer
def leaky_relu(x: Any, alpha: float = 0.02, name: str | None = None) -> Any:
    """x above 0, alpha * x below."""
    return F.leaky_relu(x, alpha)


@layer
def soft_relu(x: Any, threshold: float = 40.0, name: str | None = None) -> Any:
    """log(1 + e^x), x being held between -threshold and threshold."""
    return F.softplus(mt.clip(x, -threshold, threshold), threshold=threshold + 1)


@layer
def stanh(x: Any, scale_a: float = 0.67, scale_b: float = 1.7159, name: str | None = None) -> Any:
    """scale_b * tanh(scale_a * x)."""
    return mt.stanh(x, scale_a, scale_b)


@layer
def hard_sigmoid(x: Any, slope: float = 0.2, offset: float = 0.5, name: str | None = None) -> Any:
    """slope * x + offset, held between 0 and 1."""
    return F.hardsigmoid(x, slope, offset)


@layer
def hard_swish(x: Any, threshold: float = 6.0, scale: float = 6.0, offset: float = 3.0, name: str | None = None) -> Any:
    """x * min(max(0, x + offset), threshold) / scale."""
    return ar.multiply(x, mt.scale(mt.clip(ar.add(x, offset), 0.0, threshold), 1.0 / scale))


@layer
def swish(x: Any, beta: float = 1.0, name: str | None = None) -> Any:
    """x / (1 + e^(-beta x))."""
    return ar.multiply(x, mt.sigmoid(mt.scale(x, beta)))


@layer
def softshrink(x: Any, alpha: float | None = None) -> Any:
    """x brought nearer to 0 by alpha (0.5 if None), 0 within it."""
    return F.softshrink(x, 0.5 if alpha is None else alpha)


@layer
def hard_shrink(x: Any, threshold: float | None = None) -> Any:
    """x, 0 within threshold (0.5 if None) of 0."""
    return F.hardshrink(x, 0.5 if threshold is None else threshold)


@layer
def thresholded_relu(x: Any, threshold: float | None = None) -> Any:
    """x above threshold (1.0 if None), else 0."""
    return F.thresholded_relu(x, 1.0 if threshold is None else threshold)


@layer
def maxout(x: Any, groups: int, name: str | None = None, axis: int = 1) -> Any:
    """The largest of each `groups` neighbouring channels."""
    return F.maxout(x, groups, axis)


@layer
def clip(x: Any, min: float, max: float, name: str | None = None) -> Any:
    """x held between min and max."""
    return mt.clip(x, min, max)


@layer
def cumsum(x: Any, axis: int | None = None, exclusive: bool | None = None, reverse: bool | None = None) -> Any:
    """Running sum along axis (the last if None); exclusive: of the elements before; reverse: from the end."""
    axis = -1 if axis is None else axis
    line = flip(x, [axis]) if reverse else x
    total = running_sum(line, axis)
    total = ar.subtract(total, line) if exclusive else total
    return flip(total, [axis]) if reverse else total


__all__ = [
    "abs", "acos", "asin", "atan", "brelu", "ceil", "clip", "cos", "cumsum", "elu", "erf", "exp", "floor", "gelu",
    "hard_shrink", "hard_sigmoid", "hard_swish", "leaky_relu", "log", "log_softmax", "logsigmoid", "maxout",
    "reciprocal", "relu", "relu6", "round", "rsqrt", "selu", "sigmoid", "sign", "sin", "soft_relu", "softmax",
    "softplus", "softshrink", "softsign", "sqrt", "square", "stanh", "swish", "tanh", "tanh_shrink",
    "thresholded_relu",
]  # fmt: skip
