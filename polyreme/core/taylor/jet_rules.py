"""Propagation of Taylor coefficients through one primitive: a table of rules, and nested forward mode for all others.

A series is [c1, ..., cK], the coefficients of f(x + v t + ...) = f0 + c1 t + c2 t^2 + ..., so c_k is the
k-th derivative over k!; a coefficient that is known to be zero is None. With the value in front the same list is called
x or y here: x[0] is the value. Source of the recurrences: Griewank and Walther, Evaluating Derivatives, chapter 13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Series = list[Any]
Bind = Callable[..., list[Any]]
"""A primitive with its parameters filled in: arrays -> a list of arrays."""

# f(x + h) - f(x) is linear in h, at least piecewise: every coefficient goes through by itself
_LINEAR = frozenset({
    "neg", "add", "sub", "add_any", "reshape", "broadcast_in_dim", "transpose", "reduce_sum", "convert_element_type",
    "slice", "concatenate", "pad", "squeeze", "expand_dims", "rev", "real", "imag", "conj", "complex", "copy", "split",
    "dynamic_slice", "dynamic_update_slice", "gather", "scatter-add", "select_n", "cumsum", "reduce_window_sum", "fft",
    "reduce_precision", "device_put", "sharding_constraint", "name", "optimization_barrier", "max", "min", "clamp",
    "reduce_max", "reduce_min", "cummax", "cummin", "reduce_window_max", "reduce_window_min", "sort",
})  # fmt: skip
_BILINEAR = frozenset(("mul", "dot_general", "conv_general_dilated"))
_FLAT = frozenset(("stop_gradient", "sign", "floor", "ceil", "round"))


def coefficients(
    name: str, params: dict[str, Any], bind: Bind, ins: Sequence[Any], series: Sequence[Series | None], order: int
) -> list[Series]:
    """One series of `order` coefficients for each output, from those of the inputs (None: a constant).

    name, params: of the primitive; ins: values of its inputs.
    """
    carrying = [i for i, s in enumerate(series) if s is not None]
    if name in _FLAT:
        return [[None] * order]
    is_linear = name in _LINEAR or (name in _BILINEAR and len(carrying) == 1) or (name == "div" and carrying == [0])
    if is_linear or order == 1:
        return _linear(bind, ins, series, order)
    if name in _BILINEAR:
        x, y = ([v, *(s or ())] for v, s in zip(ins, series, strict=True))
        return [[_product(x, y, k, lambda a, b: bind(a, b)[0]) for k in range(1, order + 1)]]
    if name == "div":
        x, y = ([v, *(s or [None] * order)] for v, s in zip(ins, series, strict=True))
        return [_quotient(x, y, order)[1:]]
    if name == "integer_pow":
        (n,) = [params["y"]]
        return [_integer_power([ins[0], *series[0]], n, order)[1:]]  # type: ignore[misc]
    if name in _UNARY:
        return [_UNARY[name]([ins[0], *series[0]], order)[1:]]  # type: ignore[misc]
    return nested(bind, ins, series, order)


def _linear(bind: Bind, ins: Sequence[Any], series: Sequence[Series | None], order: int) -> list[Series]:
    results: list[list[Any]] = []
    for k in range(order):
        moving = [i for i, s in enumerate(series) if s is not None and s[k] is not None]
        if not moving:
            results.append([])
            continue

        def along(*moved: Any, at: Sequence[int] = moving) -> list[Any]:
            full = list(ins)
            for i, value in zip(at, moved, strict=True):
                full[i] = value
            return bind(*full)

        _, out = jax.jvp(along, [ins[i] for i in moving], [series[i][k] for i in moving])  # type: ignore[index]
        results.append(out)
    count = max(map(len, results), default=0)
    return [[None if not outs else _not_float0(outs[positions]) for outs in results] for positions in range(count)]


def _not_float0(tangent: Any) -> Any:
    return None if tangent.dtype == jax.dtypes.float0 else tangent


def nested(bind: Bind, ins: Sequence[Any], series: Sequence[Series | None], order: int) -> list[Series]:
    """Any function at all: forward mode inside forward mode, along the curve whose coefficients are given."""
    wide = any(jnp.finfo(v.dtype).bits == 64 for v in ins if jnp.issubdtype(v.dtype, jnp.inexact))
    start = jnp.zeros((), jnp.float64 if wide else jnp.float32)

    def curve(t: Any) -> list[Any]:
        return bind(*(v if s is None else _polynomial(v, s, t) for v, s in zip(ins, series, strict=True)))

    every = _orders(curve, order, start)
    return [
        [_scale(1 / math.factorial(k), _not_float0(every[k][at])) for k in range(1, order + 1)]
        for at in range(len(every[0]))
    ]


def _orders(curve: Callable[[Any], list[Any]], k: int, t: Any) -> list[list[Any]]:
    """The values of a curve at t and its first k derivatives, one in another."""
    if k == 0:
        return [curve(t)]
    values, slopes = jax.jvp(lambda t: _orders(curve, k - 1, t), (t,), (jnp.ones_like(t),))
    return [*values, slopes[-1]]


def _polynomial(value: Any, series: Series, t: Any) -> Any:
    total: Any = None
    for c in reversed(series):
        total = _add(c, _times(total, t.astype(jnp.finfo(value.dtype).dtype)))
    return value if total is None else value + total * t.astype(jnp.finfo(value.dtype).dtype)


# arithmetic on coefficients that may be None


def _add(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


def _times(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a * b


def _scale(factor: float, a: Any) -> Any:
    return a if a is None or factor == 1 else a * jnp.asarray(factor, a.dtype)


def _plus(number: float, x: Series) -> Series:
    return [x[0] + number, *x[1:]]


def _all_scaled(factor: float, x: Series) -> Series:
    return [_scale(factor, c) for c in x]


def _coefficient(x: Series, k: int) -> Any:
    return x[k] if k < len(x) else None


def _product(x: Series, y: Series, k: int, times: Callable[[Any, Any], Any] = _times, first: int = 0) -> Any:
    """Coefficient k of a product; from `first` terms in on both ends."""
    total = None
    for i in range(first, k + 1 - first):
        a, b = _coefficient(x, i), _coefficient(y, k - i)
        if a is not None and b is not None:
            total = _add(total, times(a, b))
    return total


def _multiply(x: Series, y: Series, order: int) -> Series:
    return [_product(x, y, k) for k in range(order + 1)]


def _integral(x: Series, slope: Series, k: int) -> Any:
    """Coefficient k of f(x(t)), from the series of f'(x(t)): k y_k = sum of j x_j slope_(k-j) over j = 1..k."""
    total = None
    for j in range(1, k + 1):
        total = _add(total, _scale(j / k, _times(_coefficient(x, j), _coefficient(slope, k - j))))
    return total


def _from_slope(value: Any, x: Series, slope: Series, order: int) -> Series:
    return [value, *(_integral(x, slope, k) for k in range(1, order + 1))]


def _quotient(x: Series, y: Series, order: int) -> Series:
    inverse = 1 / y[0]
    q = [x[0] * inverse]
    for k in range(1, order + 1):
        carried = None
        for j in range(1, k + 1):
            carried = _add(carried, _times(_coefficient(y, j), q[k - j]))
        q.append(_times(_add(_coefficient(x, k), _scale(-1, carried)), inverse))
    return q


def _reciprocal(x: Series, order: int) -> Series:
    return _quotient([jnp.ones_like(x[0])], x, order)


def _square(x: Series, order: int) -> Series:
    """x * x, each product of two different coefficients computed once."""
    series = [x[0] * x[0]]
    for k in range(1, order + 1):
        total = None
        for i in range((k + 1) // 2):
            total = _add(total, _times(_coefficient(x, i), _coefficient(x, k - i)))
        middle = _times(_coefficient(x, k // 2), _coefficient(x, k // 2)) if k % 2 == 0 else None
        series.append(_add(_scale(2, total), middle))
    return series


def _integer_power(x: Series, n: int, order: int) -> Series:
    if n < 0:
        return _reciprocal(_integer_power(x, -n, order), order)
    result, power = None, x
    while n:
        if n & 1:
            result = power if result is None else _multiply(result, power, order)
        n >>= 1
        power = _square(power, order) if n else power
    return [jnp.ones_like(x[0]), *[None] * order] if result is None else result


# functions of one variable whose slope is a simple function of x or of y itself


def _closed(x: Series, value: Any, order: int, slope: Callable[[Series, int], Series]) -> Series:
    """y with y' = slope(y) x': slope gives the series of the slope up to k from that of y up to k."""
    y = [value]
    for k in range(1, order + 1):
        y.append(_integral(x, slope(y, k - 1), k))
    return y


def _tanh(x: Series, order: int) -> Series:
    return _closed(x, jnp.tanh(x[0]), order, lambda y, k: _plus(1, _all_scaled(-1, _square(y, k))))


def _logistic(x: Series, order: int) -> Series:
    def slope(y: Series, k: int) -> Series:
        return [_add(a, _scale(-1, b)) for a, b in zip(y, _square(y, k), strict=True)]

    return _closed(x, jax.nn.sigmoid(x[0]), order, slope)


def _exp(x: Series, order: int) -> Series:
    return _closed(x, jnp.exp(x[0]), order, lambda y, k: y)


def _wave(first: Callable, second: Callable, sign: float) -> tuple[Callable, Callable]:
    """(sin, cos) or (sinh, cosh): the slope of each is the other, of the second times sign."""

    def both(x: Series, order: int) -> tuple[Series, Series]:
        s, c = [first(x[0])], [second(x[0])]
        for k in range(1, order + 1):
            s, c = [*s, _integral(x, c, k)], [*c, _scale(sign, _integral(x, s, k))]
        return s, c

    return lambda x, order: both(x, order)[0], lambda x, order: both(x, order)[1]


def _sqrt(x: Series, order: int) -> Series:
    y = [jnp.sqrt(x[0])]
    half = 0.5 / y[0]
    for k in range(1, order + 1):
        y.append(_times(_add(_coefficient(x, k), _scale(-1, _product(y, y, k, first=1))), half))
    return y


def _rsqrt(x: Series, order: int) -> Series:
    return _reciprocal(_sqrt(x, order), order)


def _by_slope(fn: Callable, slope: Callable[[Series, int], Series]) -> Callable[[Series, int], Series]:
    return lambda x, order: _from_slope(fn(x[0]), x, slope(x, order - 1), order)


def _gauss(factor: float) -> Callable[[Series, int], Series]:
    return lambda x, k: _all_scaled(factor, _exp(_all_scaled(-1, _square(x, k)), k))


_sin, _cos = _wave(jnp.sin, jnp.cos, -1)
_sinh, _cosh = _wave(jnp.sinh, jnp.cosh, 1)
_UNARY: dict[str, Callable[[Series, int], Series]] = {
    "square": _square,
    "tanh": _tanh,
    "logistic": _logistic,
    "exp": _exp,
    "exp2": lambda x, order: _exp(_all_scaled(math.log(2), x), order),
    "expm1": lambda x, order: [jnp.expm1(x[0]), *_exp(x, order)[1:]],
    "log": _by_slope(jnp.log, _reciprocal),
    "log1p": _by_slope(jnp.log1p, lambda x, k: _reciprocal(_plus(1, x), k)),
    "sin": _sin,
    "cos": _cos,
    "sinh": _sinh,
    "cosh": _cosh,
    "tan": lambda x, order: _closed(x, jnp.tan(x[0]), order, lambda y, k: _plus(1, _square(y, k))),
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "erf": _by_slope(jax.lax.erf, _gauss(2 / math.sqrt(math.pi))),
    "erfc": _by_slope(jax.lax.erfc, _gauss(-2 / math.sqrt(math.pi))),
    "atan": _by_slope(jnp.arctan, lambda x, k: _reciprocal(_plus(1, _square(x, k)), k)),
    "asinh": _by_slope(jnp.arcsinh, lambda x, k: _rsqrt(_plus(1, _square(x, k)), k)),
    "atanh": _by_slope(jnp.arctanh, lambda x, k: _reciprocal(_plus(1, _all_scaled(-1, _square(x, k))), k)),
}
