"""Activations by the names that layer functions of Programs take as act= or activation=."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyreme.errors import ConfigError, did_you_mean
from polyreme.nn import functional as F
from polyreme.ops import OPS
from polyreme.ops import math as mt


def _hard_sigmoid(x: Any) -> Any:
    return F.hardsigmoid(x, 0.2, 0.5)


# constants are the defaults of Paddle's operators, which differ from those of its functions of the same name
_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": F.relu, "relu6": F.relu6, "sigmoid": mt.sigmoid, "tanh": mt.tanh, "softmax": F.softmax, "exp": mt.exp,
    "log": mt.log, "sqrt": mt.sqrt, "rsqrt": mt.rsqrt, "square": mt.square, "abs": mt.abs, "reciprocal": mt.reciprocal,
    "softplus": F.softplus, "softsign": F.softsign, "logsigmoid": F.log_sigmoid, "tanh_shrink": F.tanhshrink,
    "gelu": F.gelu, "elu": F.elu, "selu": F.selu, "swish": F.silu, "hard_swish": F.hardswish,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.02), "hard_sigmoid": _hard_sigmoid, "hardsigmoid": _hard_sigmoid,
    "ceil": mt.ceil, "floor": mt.floor, "round": mt.round, "sin": mt.sin, "cos": mt.cos, "sign": mt.sign,
}  # fmt: skip


def activation(name: str | None) -> Callable[[Any], Any]:
    """The function of one Tensor that has this name here, else in functional, else among the ops; the identity for
    None. Raises ConfigError for an unknown name."""
    if name is None:
        return lambda x: x
    function = _ACTIVATIONS.get(name) or getattr(F, name, None) or OPS.get(name) if isinstance(name, str) else None
    if not callable(function):
        known = sorted({*_ACTIVATIONS, *F.__all__})
        raise ConfigError(f"there is no activation {name!r}{did_you_mean(str(name), known)}")
    return function


def activate(x: Any, name: str | None) -> Any:
    """x through the activation of this name, x itself for None. Raises ConfigError for an unknown name."""
    return activation(name)(x)
