"""LayerParameters: parameters of a layer function, found or made by name in the Program that is built."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.core import state, unique_name
from polyreme.errors import ConfigError, ProgramError, ShapeError
from polyreme.nn.initializer import Constant, XavierUniform, chosen_initializer
from polyreme.nn.parameter import ParamAttr, Parameter, make_parameter
from polyreme.program.current import defaults
from polyreme.regularizer import WeightDecayRegularizer


class LayerParameters:
    """The parameters of one layer: named `<layer>_<n>.w_<k>` and `.b_<k>`, or as their ParamAttr says."""

    def __init__(self, kind: str, name: str | None = None) -> None:
        _check_recording(kind)
        self.kind = kind
        self.name = name if name is not None else unique_name.generate(kind)

    def parameter(self, attr: Any, shape: Sequence[int], dtype: Any, default: Any = None, is_bias: bool = False) -> Any:
        """A parameter, the one there is if the Program has one of this name, or None for attr False."""
        wanted = _attribute_of(attr)
        if wanted is None:
            return None
        if any(int(s) < 0 for s in shape):
            raise ShapeError(
                f"fluid.layers.{self.kind}: a parameter of shape {[int(s) for s in shape]} has a size that is not "
                "known; give the input's sizes other than the batch in fluid.data"
            )
        wanted = copy.copy(wanted)
        wanted.name = wanted.name or unique_name.generate(f"{self.name}.{'b' if is_bias else 'w'}")
        have = _declare(wanted.name)
        if have is not None:
            return _share(self.kind, have, shape, dtype)
        usual = chosen_initializer(is_bias) or default or (Constant(0.0) if is_bias else XavierUniform())
        made = make_parameter(shape, dtype, wanted, usual)
        made.gradient_clip_attr = getattr(wanted, "gradient_clip", None)  # type: ignore[attr-defined]
        return made

    def bias(self, attr: Any, shape: Sequence[int], dtype: Any) -> Any:
        """A bias, zeros by default; None for attr False."""
        return self.parameter(attr, shape, dtype, is_bias=True)


def _declare(name: str) -> Any:
    """The parameter of this name in the main Program, or in the startup Program from an earlier main one."""
    main, startup = defaults.main.global_block(), defaults.startup.global_block()
    if name not in main.vars and isinstance(startup.vars.get(name), Parameter):
        main.vars[name] = startup.vars[name]
        defaults.main.changed()
    return main.vars.get(name)


def _share(kind: str, have: Any, shape: Sequence[int], dtype: Any) -> Any:
    if not isinstance(have, Parameter):
        raise ConfigError(f"fluid.layers.{kind}: parameter name {have.name!r} is taken by a variable; choose another")
    if have.shape != [int(s) for s in shape] or have.dtype != dtypes.as_dtype(dtype):
        raise ShapeError(
            f"fluid.layers.{kind}: parameter {have.name!r} is shared and has shape {have.shape} {have.dtype.name}, "
            f"needed is {[int(s) for s in shape]} {dtypes.as_dtype(dtype).name}; share it between equal layers only"
        )
    return have


def _attribute_of(attr: Any) -> ParamAttr | None:
    """The ParamAttr that a param_attr or bias_attr stands for; None for False: no parameter.

    None, a bool, a name, an initializer, a regularizer or a ParamAttr. Raises ConfigError for anything else.
    """
    if isinstance(attr, WeightDecayRegularizer):
        return ParamAttr(regularizer=attr)
    if isinstance(attr, (list, tuple)):
        raise ConfigError(f"a list of {len(attr)} parameter attributes belongs to a list of inputs; got one input")
    return ParamAttr.of(attr)


def _check_recording(what: str) -> None:
    """ProgramError if what makes parameters by name is called where no Program is built."""
    if not state.recording():
        raise ProgramError(
            f"fluid.layers.{what} makes parameters of a Program, and inside dygraph.guard() there is none; use the "
            "layer of fluid.dygraph"
        )
