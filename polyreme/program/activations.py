"""Activations by the names that layer functions of Programs take as act=."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyreme.errors import ConfigError, did_you_mean
from polyreme.nn import functional as F
from polyreme.ops import math as mt

_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": F.relu, "relu6": F.relu6, "sigmoid": mt.sigmoid, "tanh": mt.tanh, "softmax": F.softmax, "exp": mt.exp,
    "log": mt.log, "sqrt": mt.sqrt, "rsqrt": mt.rsqrt, "square": mt.square, "abs": mt.abs, "reciprocal": mt.reciprocal,
    "softplus": F.softplus, "softsign": F.softsign, "logsigmoid": F.log_sigmoid, "tanh_shrink": F.tanhshrink,
    "gelu": F.gelu, "elu": F.elu, "selu": F.selu, "swish": F.silu, "hard_swish": F.hardswish,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.02), "hard_sigmoid": lambda x: F.hardsigmoid(x, 0.2, 0.5),
    "ceil": mt.ceil, "floor": mt.floor, "round": mt.round, "sin": mt.sin, "cos": mt.cos, "sign": mt.sign,
}  # fmt: skip


def activate(x: Any, act: str | None) -> Any:
    """x through the activation of this name, x itself for None. Raises ConfigError for an unknown name."""
    if act is None:
        return x
    if not isinstance(act, str) or act not in _ACTIVATIONS:
        raise ConfigError(
            f"act={act!r} is no activation{did_you_mean(str(act), _ACTIVATIONS)}; there are {sorted(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[act](x)
