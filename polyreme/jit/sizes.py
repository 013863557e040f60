"""Numbers that follow from shapes alone: known while code is captured, to whoever needs them as sizes.

`paddle.shape(x)[2:] * 2` is a Tensor of the program like any other, and loops treat it as one. Where it is given for
sizes of a result, read on the host, or decides an if, the numbers are taken that are computed beside it here, from the
shapes that the capture is made for; in an export they may hold sizes that it leaves open.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core.state import TensorState


def _scaled(combine: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda x, y, alpha=1: combine(x, y * alpha)


def _compared(compare: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def form(x: Any, y: Any) -> Any:
        if not all(isinstance(n, int) for side in (x, y) for n in np.ravel(side).tolist()):
            return _unknown()  # an open size may lie on either side
        return compare(np.asarray(x, object), np.asarray(y, object))

    return form


def _cast(x: np.ndarray, dtype: Any) -> np.ndarray:
    if not dtypes.is_integer(dtypes.as_dtype(dtype)):
        raise TypeError("not sizes any more")
    return x


_OF_SHAPES: dict[str, Callable[[Any], Any]] = {
    "shape": lambda x: x.shape,
    "numel": lambda x: x.size,
    "rank": lambda x: x.ndim,
}
"""By name of the op, what it tells of an array."""

_FORMS: dict[str, Callable[..., Any]] = {
    "Tensor.__getitem__": lambda x, key: x[key],
    "add": _scaled(operator.add),
    "subtract": _scaled(operator.sub),
    "multiply": operator.mul,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "neg": operator.neg,
    "equal": _compared(operator.eq),
    "not_equal": _compared(operator.ne),
    "less_than": _compared(operator.lt),
    "less_equal": _compared(operator.le),
    "greater_than": _compared(operator.gt),
    "greater_equal": _compared(operator.ge),
    "cast": _cast,
    "assign": lambda x: x,
    "concat": np.concatenate,
    "stack": np.stack,
    "unbind": lambda x, axis=0: list(np.moveaxis(x, axis, 0)),
    "split": lambda x, parts, axis=0: np.split(x, parts, axis) if isinstance(parts, int) else _unknown(),
    "squeeze": lambda x, axis=None: np.squeeze(x, None if axis is None else tuple(np.atleast_1d(axis).tolist())),
    "unsqueeze": lambda x, axis: np.expand_dims(x, tuple(np.atleast_1d(axis).tolist())),
    "reshape": np.reshape,
    "prod": lambda x, axis=None, *_: np.prod(x) if axis is None else _unknown(),
    "sum": lambda x, axis=None, *_: np.sum(x) if axis is None else _unknown(),
}
"""By name of the function, the same on NumPy's arrays of Python numbers and open sizes."""


def _unknown() -> Any:
    raise TypeError("not followed")


class KnownSizes:
    """The Tensors of a capture whose numbers follow from shapes."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[TensorState, np.ndarray]] = {}

    def note(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """A function was called: what it gave is known if it tells of a shape, or all it takes is known."""
        if (tell := _OF_SHAPES.get(name)) is not None and isinstance(args[0], TensorState):
            self._keep(result, np.asarray(tell(args[0]._array), object))
        elif self._values and (form := _FORMS.get(name)) is not None:
            try:
                taken = [self._numbers(value) for value in args]
                given = {key: self._numbers(value) for key, value in kwargs.items()}
                self._keep(result, form(*taken, **given))
            except (TypeError, ValueError, IndexError, ArithmeticError):  # it takes Tensors of other numbers
                return

    def of(self, tensor: TensorState) -> np.ndarray | None:
        """The numbers of a Tensor, Python's or open sizes in an array of objects; None where shapes do not say them."""
        known = self._values.get(id(tensor))
        return None if known is None else known[1]

    def forget(self, tensor: TensorState) -> None:
        """The Tensor is given another value."""
        self._values.pop(id(tensor), None)

    def _numbers(self, value: Any) -> Any:
        if isinstance(value, TensorState):
            known = self.of(value)
            return _unknown() if known is None else known
        if isinstance(value, (list, tuple)) and any(isinstance(part, TensorState) for part in value):
            return [self._numbers(part) for part in value]
        return value

    def _keep(self, result: Any, value: Any) -> None:
        if isinstance(result, TensorState):
            value = np.asarray(value, object)
            if value.shape == tuple(result._array.shape):
                self._values[id(result)] = (result, value)
        elif isinstance(result, (list, tuple)) and isinstance(value, list) and len(result) == len(value):
            for one, number in zip(result, value, strict=True):
                self._keep(one, number)
