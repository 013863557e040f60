"""What every function of fluid.layers is made with: recording, parameters by name, activations."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.core import unique_name
from polyreme.errors import ConfigError, ShapeError, did_you_mean
from polyreme.fluid.mode import begin, needs_program
from polyreme.fluid.param_attr import attribute_of
from polyreme.nn import functional as F
from polyreme.nn.initializer import Constant, XavierUniform, chosen_initializer
from polyreme.nn.parameter import Parameter, make_parameter
from polyreme.ops import math as mt
from polyreme.ops.manipulation import flatten
from polyreme.program.current import defaults


def layer(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of fluid.layers: what it calls is recorded, see fluid.mode."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        begin()
        return fn(*args, **kwargs)

    return run


class Parts:
    """The parameters of one layer: named `<layer>_<n>.w_<k>` and `.b_<k>`, or as their ParamAttr says."""

    def __init__(self, kind: str, name: str | None = None) -> None:
        needs_program(kind)
        self.kind = kind
        self.name = name if name is not None else unique_name.generate(kind)

    def parameter(self, attr: Any, shape: Sequence[int], dtype: Any, default: Any = None, is_bias: bool = False) -> Any:
        """A parameter, the one there is if the Program has one of this name, or None for attr False."""
        wanted = attribute_of(attr)
        if wanted is None:
            return None
        if any(int(s) < 0 for s in shape):
            raise ShapeError(
                f"fluid.layers.{self.kind}: a parameter of shape {[int(s) for s in shape]} has a size that is not "
                "known; give the input's sizes other than the batch in fluid.data"
            )
        wanted = copy.copy(wanted)
        wanted.name = wanted.name or unique_name.generate(f"{self.name}.{'b' if is_bias else 'w'}")
        have = _declared(wanted.name)
        if have is not None:
            return _shared(self.kind, have, shape, dtype)
        usual = chosen_initializer(is_bias) or default or (Constant(0.0) if is_bias else XavierUniform())
        made = make_parameter(shape, dtype, wanted, usual)
        made.gradient_clip_attr = getattr(wanted, "gradient_clip", None)  # type: ignore[attr-defined]
        return made

    def bias(self, attr: Any, shape: Sequence[int], dtype: Any) -> Any:
        """A bias, zeros by default; None for attr False."""
        return self.parameter(attr, shape, dtype, is_bias=True)


def _declared(name: str) -> Any:
    """The parameter of this name in the main Program, or in the startup Program from an earlier main one."""
    main, startup = defaults.main.global_block(), defaults.startup.global_block()
    if name not in main.vars and isinstance(startup.vars.get(name), Parameter):
        main.vars[name] = startup.vars[name]
        defaults.main.changed()
    return main.vars.get(name)


def _shared(kind: str, have: Any, shape: Sequence[int], dtype: Any) -> Any:
    if not isinstance(have, Parameter):
        raise ConfigError(f"fluid.layers.{kind}: parameter name {have.name!r} is taken by a variable; choose another")
    if have.shape != [int(s) for s in shape] or have.dtype != dtypes.as_dtype(dtype):
        raise ShapeError(
            f"fluid.layers.{kind}: parameter {have.name!r} is shared and has shape {have.shape} {have.dtype.name}, "
            f"needed is {[int(s) for s in shape]} {dtypes.as_dtype(dtype).name}; share it between equal layers only"
        )
    return have


_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": F.relu, "relu6": F.relu6, "sigmoid": mt.sigmoid, "tanh": mt.tanh, "softmax": F.softmax, "exp": mt.exp,
    "log": mt.log, "sqrt": mt.sqrt, "rsqrt": mt.rsqrt, "square": mt.square, "abs": mt.abs, "reciprocal": mt.reciprocal,
    "softplus": F.softplus, "softsign": F.softsign, "logsigmoid": F.log_sigmoid, "tanh_shrink": F.tanhshrink,
    "gelu": F.gelu, "elu": F.elu, "selu": F.selu, "swish": F.silu, "hard_swish": F.hardswish,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.02), "hard_sigmoid": lambda x: F.hardsigmoid(x, 0.2, 0.5),
    "ceil": mt.ceil, "floor": mt.floor, "round": mt.round, "sin": mt.sin, "cos": mt.cos, "sign": mt.sign,
}  # fmt: skip


def activated(x: Any, act: str | None) -> Any:
    """x through the activation of this name, x itself for None. Raises ConfigError for an unknown name."""
    if act is None:
        return x
    if not isinstance(act, str) or act not in _ACTIVATIONS:
        raise ConfigError(
            f"act={act!r} is no activation{did_you_mean(str(act), _ACTIVATIONS)}; there are {sorted(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[act](x)


def one(value: Any) -> Any:
    """A number as 1.7 has it: of shape [1]."""
    return flatten(value) if not value.shape else value


def unsupported(what: str, parameter: str, value: Any, instead: str) -> None:
    """ConfigError for a parameter whose value cannot be honoured."""
    raise ConfigError(f"fluid.layers.{what}: {parameter}={value!r} cannot be honoured; {instead}")


def seedless(what: str, seed: Any) -> None:
    """ConfigError for a seed of one op's own."""
    if seed not in (None, 0):
        unsupported(what, "seed", seed, "set Program.random_seed, which fixes every random op of the Program")


__all__ = ["Parts", "activated", "layer", "one", "seedless", "unsupported"]
