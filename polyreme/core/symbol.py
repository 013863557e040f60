"""Symbol: stands for the array of a Tensor in a static Program, which has no value until an Executor runs it.

Floor: 1.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from polyreme.errors import CaptureError

DYNAMIC = -1
"""A size that is not known before a Program runs."""

PROBES = (2520, 5040)
"""Two sizes that stand for a dynamic dim while shapes are inferred: what differs between them is dynamic. Both divide
by every number up to 10, so that reshapes into parts go through."""


class Size(int):
    """A dynamic size, -1 to whoever computes with it; given to an op it is the size that the dim has when it runs."""

    symbol: Symbol
    dim: int

    @classmethod
    def of(cls, symbol: Symbol, dim: int) -> Size:
        """The size of a dim of what symbol stands for."""
        made = cls(DYNAMIC)
        made.symbol, made.dim = symbol, dim
        return made


class Symbol:
    """name: of the value in its Program, assigned once. shape: sizes, -1 for a dynamic one.

    known: the values under the two PROBES where those follow from shapes alone, as those of `shape(x)` do; else None.
    """

    __slots__ = ("dtype", "known", "name", "shape", "weak_type")

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: Any,
        weak_type: bool = False,
        known: tuple[Any, Any] | None = None,
    ) -> None:
        self.name = name
        self.shape = tuple(Size.of(self, i) if d == DYNAMIC else d for i, d in enumerate(shape))
        self.dtype = np.dtype(dtype)
        self.weak_type = weak_type
        self.known = known

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements, -1 if a dim is dynamic."""
        return DYNAMIC if self.is_dynamic else math.prod(self.shape)

    @property
    def is_dynamic(self) -> bool:
        return DYNAMIC in self.shape

    def at(self, probe: int) -> Any:
        """What shape inference takes in its place: an abstract array with the probe for every dynamic dim, or the
        known value.
        """
        if self.known is not None:
            return self.known[PROBES.index(probe)]
        sizes = tuple(probe if d == DYNAMIC else d for d in self.shape)
        return jax.ShapeDtypeStruct(sizes, self.dtype, weak_type=self.weak_type)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CaptureError(
            f"Variable {self.name!r} of a static Program has no value to take {name!r} of before Executor.run; "
            "fetch it, or use an op"
        )

    def __repr__(self) -> str:
        return f"{self.name}: {self.dtype.name}{list(self.shape)}"
