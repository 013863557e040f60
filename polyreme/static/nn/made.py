"""What layer functions share: where their parameters come from, and activations by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from polyreme.core import state, unique_name
from polyreme.core.symbol import DYNAMIC
from polyreme.eager.mode import no_grad
from polyreme.errors import ConfigError, ProgramError, ShapeError, did_you_mean
from polyreme.nn import functional as F
from polyreme.nn.initializer import Constant
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import ParamAttr
from polyreme.ops import OPS
from polyreme.ops.manipulation import reshape
from polyreme.ops.math import sqrt
from polyreme.ops.reduce import sum
from polyreme.program.current import default_startup_program, program_guard
from polyreme.static.variables import WeightNormParamAttr


class ParameterMaker(Layer):
    """Makes the parameters of one call of a layer function, named `<kind>_<n>.w_<k>` and `.b_<k>`.

    name: stands in place of `<kind>_<n>`; used twice, k goes on counting. Raises ProgramError outside static mode.
    """

    def __init__(self, kind: str, name: str | None, dtype: Any) -> None:
        if not state.recording():
            raise ProgramError(
                f"static.nn.{kind} makes parameters of a static Program: call enable_static() first, or use the layer "
                "of polyreme.nn"
            )
        super().__init__(kind if name is None else name, dtype)
        if name is not None:
            self._full_name = name

    def create_parameter(
        self,
        shape: Sequence[int],
        attr: Any = None,
        dtype: Any = None,
        is_bias: bool = False,
        default_initializer: Any = None,
        dims: Sequence[str | None] | None = None,
    ) -> Any:
        wanted = attr.plain() if isinstance(attr, WeightNormParamAttr) else ParamAttr.of(attr)
        if wanted is None:
            return None
        if any(size == DYNAMIC for size in shape):
            raise ShapeError(
                f"{self._full_name}: a parameter would have shape {list(shape)}; give static.data the sizes that are -1"
            )
        if isinstance(attr, WeightNormParamAttr):
            return self._normalized(shape, attr, wanted, dtype, default_initializer)
        if wanted.name is None:
            wanted = replace(wanted, name=unique_name.generate(f"{self._full_name}.{'b' if is_bias else 'w'}"))
        return super().create_parameter(shape, wanted, dtype, is_bias, default_initializer, dims)

    def _normalized(
        self, shape: Sequence[int], attr: WeightNormParamAttr, attr_of_part: ParamAttr, dtype: Any, initializer: Any
    ) -> Any:
        """g * v / ||v||, of parameters g and v."""
        dims = attr.lengths(shape)
        norm_shape = [1 if d in dims else size for d, size in enumerate(shape)]
        v_name, g_name = (
            unique_name.generate(f"{self._full_name}.weight_norm_{part}")
            if attr.name is None
            else f"{attr.name}_{part}"
            for part in "vg"
        )
        v = self.create_parameter(shape, replace(attr_of_part, name=v_name), dtype, False, initializer)
        count = [math.prod(norm_shape)]
        g = self.create_parameter(count, replace(attr_of_part, name=g_name, initializer=Constant(1.0)), dtype)
        with program_guard(default_startup_program()), no_grad():
            state.write(g, state.read(reshape(_length(v, dims), count)))
        return v * (reshape(g, norm_shape) / _length(v, dims))

    def statistic(self, shape: Sequence[int], name: str | None, initializer: Any) -> Any:
        """A parameter that is not trained."""
        return self.create_parameter(shape, ParamAttr(name=name, trainable=False), default_initializer=initializer)


def _length(v: Any, dims: Sequence[int]) -> Any:
    return sqrt(sum(v * v, list(dims), keepdim=True))


def activation(what: str, name: str | None) -> Callable[[Any], Any]:
    """The function of one Tensor that an act= names, the identity for None; ConfigError if there is none."""
    if name is None:
        return lambda x: x
    found = getattr(F, name, None) or OPS.get(name) if isinstance(name, str) else None
    if not callable(found):
        raise ConfigError(f"{what}: there is no activation {name!r}{did_you_mean(str(name), F.__all__)}")
    return found


def refuse(what: str, **settings: tuple[Any, str]) -> None:
    """ConfigError for the settings that are on and cannot be honoured: name -> (value, why)."""
    for name, (value, why) in settings.items():
        if value:
            raise ConfigError(f"{what}: {name}={value!r} cannot be honoured: {why}")


def channels(what: str, x: Any, data_format: str, ndims: Sequence[int]) -> int:
    """How many channels x has, the second dim or the last one."""
    if x.ndim not in ndims:
        raise ShapeError(f"{what} takes {' or '.join(map(str, ndims))} dims, got shape {list(x.shape)}")
    if not (
        isinstance(data_format, str) and data_format.startswith("N") and "C" in (data_format[1:2], data_format[-1])
    ):
        raise ConfigError(f"{what}: data format {data_format!r}; give 'NCHW' or the like, or 'NHWC' or the like")
    return x.shape[1 if data_format[1] == "C" else -1]
