"""LayerParameters: parameters of a layer function, by name in the Program that is built."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.core import state, unique_name
from polyreme.eager.mode import no_grad
from polyreme.errors import ConfigError, ProgramError, ShapeError
from polyreme.nn.initializer import Constant, XavierUniform, chosen_initializer
from polyreme.nn.parameter import ParamAttr, Parameter, make_parameter
from polyreme.ops.manipulation import reshape
from polyreme.ops.math import sqrt
from polyreme.ops.reduce import sum
from polyreme.program.current import default_startup_program, defaults, program_guard
from polyreme.regularizer import WeightDecayRegularizer


@dataclass
class WeightNormParamAttr:
    """ParamAttr for layer functions whose weight is direction times length, w = g * v / ||v||: arXiv:1602.07868.

    dim: the one that has a length of its own for each index; None for one length over all. The other fields are
    ParamAttr's, for v and g alike; initializer gives v, and g starts as ||v||, so that w starts as v.
    Layers of polyreme.nn do not take it.
    """

    dim: int | None = None
    name: str | None = None
    initializer: Any = None
    learning_rate: float = 1.0
    regularizer: Any = None
    trainable: bool = True
    do_model_average: bool = False
    need_clip: bool = True

    def plain(self) -> ParamAttr:
        """As the ParamAttr of one of its parts, which still wants a name."""
        common = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("dim", "name")}
        return ParamAttr(**common)

    def lengths(self, shape: Sequence[int]) -> list[int]:
        """The dims of v that each length is taken over. Raises ConfigError for a dim that is not there."""
        if self.dim is None:
            return list(range(len(shape)))
        if not -len(shape) <= self.dim < len(shape):
            raise ConfigError(f"WeightNormParamAttr: dim={self.dim} of a parameter of shape {list(shape)}")
        return [d for d in range(len(shape)) if d != self.dim % len(shape)]


class LayerParameters:
    """The parameters of one call of a layer function, named `<layer>_<n>.w_<k>` and `.b_<k>`, or as their attribute
    says.

    name: stands in place of `<layer>_<n>`; used twice, k goes on counting. Raises ProgramError where no Program is
    built.
    """

    name: str

    def __init__(self, kind: str, name: str | None = None) -> None:
        check_recording(kind)
        self.kind = kind
        self.name = name if name is not None else unique_name.generate(kind)

    def parameter(self, attr: Any, shape: Sequence[int], dtype: Any, default: Any = None, is_bias: bool = False) -> Any:
        """A parameter, the one there is if the Program has one of this name, or None for attr False.

        attr: what ParamAttr.of takes, a regularizer, or a WeightNormParamAttr, for which it is a Variable made of two
        parameters. default: the initializer if neither attr nor set_global_initializer says one; Xavier-uniform if
        None, zeros for a bias. Raises ShapeError for a size that is not known.
        """
        wanted = attr.plain() if isinstance(attr, WeightNormParamAttr) else _attribute_of(attr)
        if wanted is None:
            return None
        if any(int(size) < 0 for size in shape):
            raise ShapeError(
                f"{self.kind}: a parameter would have shape {[int(size) for size in shape]}; give the sizes that are "
                "-1 where the input is declared with data(), all but the batch's"
            )
        if isinstance(attr, WeightNormParamAttr):
            return self._normalized(attr, shape, dtype, default)
        wanted = copy.copy(wanted)
        wanted.name = wanted.name or unique_name.generate(f"{self.name}.{'b' if is_bias else 'w'}")
        declared = _declare(wanted.name)
        if declared is not None:
            return _share(self.kind, declared, shape, dtype)
        initializer = chosen_initializer(is_bias) or default or (Constant(0.0) if is_bias else XavierUniform())
        parameter = make_parameter(shape, dtype, wanted, initializer)
        parameter.gradient_clip_attr = getattr(wanted, "gradient_clip", None)  # type: ignore[attr-defined]
        return parameter

    def bias(self, attr: Any, shape: Sequence[int], dtype: Any) -> Any:
        """A bias, zeros by default; None for attr False."""
        return self.parameter(attr, shape, dtype, is_bias=True)

    def statistic(self, name: str | None, shape: Sequence[int], dtype: Any, initializer: Any) -> Any:
        """A parameter that is not trained."""
        statistic = self.parameter(ParamAttr(name=name, trainable=False), shape, dtype, initializer)
        statistic.is_statistic = True
        return statistic

    def _normalized(self, attr: WeightNormParamAttr, shape: Sequence[int], dtype: Any, default: Any) -> Any:
        """g * v / ||v||, of parameters g and v."""
        dims = attr.lengths(shape)
        norm_shape = [1 if d in dims else size for d, size in enumerate(shape)]
        v_name, g_name = (
            unique_name.generate(f"{self.name}.weight_norm_{part}") if attr.name is None else f"{attr.name}_{part}"
            for part in "vg"
        )
        v = self.parameter(replace(attr.plain(), name=v_name), shape, dtype, default)
        count = [math.prod(norm_shape)]
        g = self.parameter(replace(attr.plain(), name=g_name, initializer=Constant(1.0)), count, dtype)
        with program_guard(default_startup_program()), no_grad():
            state.write(g, state.read(reshape(_length(v, dims), count)))
        return v * (reshape(g, norm_shape) / _length(v, dims))


def _length(v: Any, dims: Sequence[int]) -> Any:
    return sqrt(sum(v * v, list(dims), keepdim=True))


def _declare(name: str) -> Any:
    """The parameter of this name in the main Program, or in the startup Program from an earlier main one."""
    main, startup = defaults.main.global_block(), defaults.startup.global_block()
    if name not in main.vars and isinstance(startup.vars.get(name), Parameter):
        main.vars[name] = startup.vars[name]
        defaults.main.changed()
    return main.vars.get(name)


def _share(kind: str, declared: Any, shape: Sequence[int], dtype: Any) -> Any:
    """The parameter that has the name already. Raises ProgramError unless it is one of this shape and dtype."""
    sizes, wanted = [int(size) for size in shape], dtypes.as_dtype(dtype)
    if not isinstance(declared, Parameter) or declared.shape != sizes or declared.dtype != wanted:
        raise ProgramError(
            f"{kind}: the Program already has {declared._array!r}; a parameter {wanted.name}{sizes} cannot share it, "
            "give it another name"
        )
    return declared


def _attribute_of(attr: Any) -> ParamAttr | None:
    """The ParamAttr that a param_attr or bias_attr stands for; None for False: no parameter.

    None, a bool, a name, an initializer, a regularizer or a ParamAttr. Raises ConfigError for anything else.
    """
    if isinstance(attr, WeightDecayRegularizer):
        return ParamAttr(regularizer=attr)
    if isinstance(attr, (list, tuple)):
        raise ConfigError(f"a list of {len(attr)} parameter attributes belongs to a list of inputs; got one input")
    return ParamAttr.of(attr)


def check_recording(what: str) -> None:
    """ProgramError if what makes parameters by name is called where no Program is built."""
    if not state.recording():
        raise ProgramError(
            f"{what} makes parameters of a Program, and none is built here; call enable_static() first, or use the "
            "Layer of nn (of fluid.dygraph inside dygraph.guard())"
        )
