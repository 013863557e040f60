"""Symbol: stands for the array of a Tensor in a static Program, which has no value until an Executor runs it."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from polyreme.core import state
from polyreme.errors import CaptureError

DYNAMIC = -1
"""A size that is not known before a Program runs."""

PROBES = (3360, 6720)
"""Two sizes that stand for a dynamic dim while shapes are inferred: what differs between them is dynamic. Both divide
by every number up to 8 and by 10, so that reshapes into parts go through, and by 32, so that images halved five times
and doubled again have the sizes that they had."""


def _operator(name: str) -> Any:
    """An operator of Size, as Tensors have it."""

    def compute(size: DynamicSize, *operands: Any) -> Any:
        recorder = state.recorder()
        if recorder is None:
            raise CaptureError(f"{size.described} is not known before Executor.run; compute with it in static mode")
        return getattr(recorder.size_of(size), name)(*operands)

    return compute


def _comparison(name: str) -> Any:
    """An order of Size and a number."""

    def compare(size: DynamicSize, other: Any) -> Any:
        if isinstance(other, state.TensorState):
            return NotImplemented
        if isinstance(other, int) and not isinstance(other, DynamicSize) and other <= 0:
            return getattr(int, name)(size, other)
        raise CaptureError(
            f"{size.described} is not known before Executor.run, so neither is whether it is above or below {other!r}; "
            f"give static.data that size, or compare polyreme.shape(x)[{size.dim}] in static.nn.cond"
        )

    return compare


class DynamicSize(int):
    """A dynamic size: -1 to whoever looks at it; given to an op it is the size that the dim has when it runs.

    Arithmetic on it is recorded: the result is an integer Variable, which ops take as a size too. Comparing it with 0
    or less compares -1; with anything else an order has no answer, and raises CaptureError.
    """

    symbol: Symbol
    dim: int
    __array_ufunc__ = None  # a NumPy number on the left leaves arithmetic to Size

    @classmethod
    def of(cls, symbol: Symbol, dim: int) -> DynamicSize:
        """The size of a dim of what symbol stands for."""
        made = cls(DYNAMIC)
        made.symbol, made.dim = symbol, dim
        return made

    @property
    def described(self) -> str:
        """The name of the symbol in messages."""
        return f"size {self.dim} of {self.symbol!r}"

    __add__: Any = _operator("__add__")
    __radd__: Any = _operator("__radd__")
    __sub__: Any = _operator("__sub__")
    __rsub__: Any = _operator("__rsub__")
    __mul__: Any = _operator("__mul__")
    __rmul__: Any = _operator("__rmul__")
    __floordiv__: Any = _operator("__floordiv__")
    __rfloordiv__: Any = _operator("__rfloordiv__")
    __truediv__: Any = _operator("__truediv__")
    __rtruediv__: Any = _operator("__rtruediv__")
    __mod__: Any = _operator("__mod__")
    __rmod__: Any = _operator("__rmod__")
    __pow__: Any = _operator("__pow__")
    __rpow__: Any = _operator("__rpow__")
    __and__: Any = _operator("__and__")
    __rand__: Any = _operator("__rand__")
    __or__: Any = _operator("__or__")
    __ror__: Any = _operator("__ror__")
    __xor__: Any = _operator("__xor__")
    __rxor__: Any = _operator("__rxor__")
    __neg__: Any = _operator("__neg__")
    __abs__: Any = _operator("__abs__")
    __invert__: Any = _operator("__invert__")
    __divmod__, __float__ = _operator("__divmod__"), _operator("__float__")
    __lt__, __le__ = _comparison("__lt__"), _comparison("__le__")
    __gt__, __ge__ = _comparison("__gt__"), _comparison("__ge__")


class Symbol:
    """name: of the value in its Program, assigned once. shape: sizes, -1 for a dynamic one.

    known: the values under the two PROBES where those follow from shapes alone, as those of `shape(x)` do, or are
    constants; else None.
    sizes: the shape under each of the PROBES; the probe for every dynamic dim if None.
    """

    dtype: np.dtype[Any]
    known: tuple[Any, Any] | None
    name: str
    shape: tuple[DynamicSize | int, ...]
    sizes: tuple[tuple[int, ...], tuple[int, ...]] | None
    weak_type: bool

    __slots__ = ("dtype", "known", "name", "shape", "sizes", "weak_type")

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: Any,
        weak_type: bool = False,
        known: tuple[Any, Any] | None = None,
        sizes: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    ) -> None:
        self.name = name
        self.shape = tuple(DynamicSize.of(self, i) if d == DYNAMIC else d for i, d in enumerate(shape))
        self.dtype = np.dtype(dtype)
        self.weak_type = weak_type
        self.known = known
        self.sizes = sizes

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

    @property
    def follows_sizes(self) -> bool:
        """Whether its values are known and depend on sizes that are not."""
        return self.known is not None and not np.array_equal(*self.known)

    def at(self, probe: int) -> Any:
        """The value for shape inference: an abstract array with the probe for every dynamic dim, or the known value."""
        if self.known is not None:
            return self.known[PROBES.index(probe)]
        if self.sizes is not None:
            return jax.ShapeDtypeStruct(self.sizes[PROBES.index(probe)], self.dtype, weak_type=self.weak_type)
        sizes = tuple(probe if d == DYNAMIC else d for d in self.shape)
        return jax.ShapeDtypeStruct(sizes, self.dtype, weak_type=self.weak_type)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "aval":  # by which the eager mode knows jax's arrays
            raise AttributeError(name)
        raise CaptureError(
            f"Variable {self.name!r} of a static Program has no value, which this needs ({name!r} of it): ops on it "
            "are recorded in static mode only, see enable_static(), and Executor.run gives values"
        )

    def __repr__(self) -> str:
        return f"{self.name}: {self.dtype.name}{list(self.shape)}"


def refuse_sizes(what: str, data: Any) -> None:
    """Raise CaptureError if data is a Size or a list that holds one, which a constant would be -1 for."""
    if isinstance(data, DynamicSize):
        raise CaptureError(
            f"{what}: {data.described} is not known before Executor.run, so it is no constant; compute it from "
            f"polyreme.shape(x)[{data.dim}], and join such values by stack()"
        )
    if isinstance(data, (list, tuple)):
        for entry in data:
            refuse_sizes(what, entry)
