"""Variables with initial values: create_global_var and create_parameter; parameters as direction times length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import state, unique_name
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, ProgramError
from polyreme.nn.parameter import ParamAttr
from polyreme.ops.creation import full
from polyreme.root import create_parameter

__all__ = ["WeightNormParamAttr", "create_global_var", "create_parameter"]


def create_global_var(
    shape: Sequence[int],
    value: float,
    dtype: Any,
    persistable: bool = False,
    force_cpu: bool = False,
    name: str | None = None,
) -> Any:
    """A Variable that is filled with value: by the startup Program if persistable, else at the start of every run.

    force_cpu: where it lies is for the compiler to say, and its value is the same. Raises ProgramError outside static
    mode and for a name that is taken by something else.
    """
    if (recorder := state.recorder()) is None:
        raise ProgramError("create_global_var makes a Variable of a static Program; call enable_static() first")
    sizes, wanted = [int(size) for size in shape], dtypes.as_dtype(dtype)
    if not persistable:
        made = full(sizes, value, wanted)
        if name is not None:
            made.name = name
            made.block.vars.setdefault(name, made)
        return made
    start = Tensor(np.full(sizes, value, wanted))
    return recorder.declare_buffer(name or unique_name.generate("create_global_var"), start)


@dataclass
class WeightNormParamAttr:
    """ParamAttr for static.nn layers whose weight is direction times length, w = g * v / ||v||: arXiv:1602.07868.

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
