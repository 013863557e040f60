"""Parameters of a distribution: numbers, sequences, ndarrays and Tensors as Tensors of one dtype and shape, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError, DTypeError
from polyreme.ops.arithmetic import cast
from polyreme.ops.ids import visible
from polyreme.ops.repetition import broadcast_tensors, expand


@dataclass(frozen=True)
class Constraint:
    """What every element of a parameter must satisfy; NaN satisfies none."""

    holds: Callable[[np.ndarray], Any]
    says: str


positive: Constraint = Constraint(lambda v: v > 0, "above 0")
non_negative: Constraint = Constraint(lambda v: v >= 0, "at least 0")
probability: Constraint = Constraint(lambda v: (v >= 0) & (v <= 1), "between 0 and 1")
below_infinity: Constraint = Constraint(lambda v: v < np.inf, "a number below infinity")
above_zero_to_one: Constraint = Constraint(lambda v: (v > 0) & (v <= 1), "above 0 and at most 1")


def check(family: str, name: str, value: Any, constraint: Constraint) -> None:
    """Raise ConfigError if a value does not satisfy constraint, DTypeError for one that is no number.

    What has no value yet (in a capture) is not looked at. Reads the host, once for each parameter.
    """
    values = concrete(value)
    if values is not None and values.dtype.kind in "OUS":
        raise DTypeError(f"{family}: {name} is {value!r}; give a number, a sequence of them or a Tensor")
    if values is not None and not np.all(constraint.holds(values)):
        bad = values[~np.asarray(constraint.holds(values))] if values.ndim else values
        raise ConfigError(
            f"{family}: {name} needs every value {constraint.says}, got {float(np.ravel(bad)[0])!r}; "
            f"transform {name} first, such as by exp or sigmoid, or give other values"
        )


def concrete(given: Any) -> np.ndarray | None:
    """The value on the host of what was given, or None for a Tensor that has none here (captured, or spread out)."""
    return visible(given) if isinstance(given, state.TensorState) else np.asarray(given)


def as_tensors(family: str, **parameters: Any) -> list[Tensor]:
    """Each parameter as a floating Tensor, all of the widest dtype among them (complex ones keep theirs), in its shape.

    Python numbers and integers take the default dtype and widen nothing.
    """
    tensors = {name: _as_tensor(family, name, value) for name, value in parameters.items()}
    strong = [t for n, t in tensors.items() if not isinstance(parameters[n], (bool, int, float, complex))]
    common = np.result_type(*(_real(t.dtype) for t in strong or tensors.values()))
    return [t if t.dtype == common or t.is_complex() else cast(t, common) for t in tensors.values()]


def _real(dtype: np.dtype) -> np.dtype:
    return {dtypes.complex64: dtypes.float32, dtypes.complex128: dtypes.float64}.get(dtype, dtype)


def _as_tensor(family: str, name: str, value: Any) -> Tensor:
    if not isinstance(value, (bool, int, float, complex, list, tuple, np.ndarray, np.generic, state.TensorState)):
        raise DTypeError(f"{family}: {name} is a {type(value).__name__}; give a number, a sequence of them or a Tensor")
    tensor = value if isinstance(value, Tensor) else to_tensor(value)
    return tensor if dtypes.is_inexact(tensor.dtype) else cast(tensor, dtypes.default_dtype())


def broadcast(family: str, **parameters: Any) -> list[Tensor]:
    """as_tensors, expanded to the one shape they broadcast to; what has that shape stays the Tensor it is.

    Raises ShapeError if they do not broadcast.
    """
    tensors = as_tensors(family, **parameters)
    if all(t.shape == tensors[0].shape for t in tensors):
        return tensors
    expanded = broadcast_tensors(tensors)
    return [t if t.shape == wide.shape else wide for t, wide in zip(tensors, expanded, strict=True)]


def as_value(value: Any, like: Tensor) -> Tensor:
    """An argument of log_prob and its like as a floating Tensor: integers and Python numbers take like's dtype."""
    if isinstance(value, (bool, int, float)):
        return to_tensor(value, like.dtype)
    tensor = value if isinstance(value, Tensor) else to_tensor(value)
    return tensor if dtypes.is_inexact(tensor.dtype) else cast(tensor, like.dtype)


def repeated(x: Tensor, shape: Sequence[int]) -> Tensor:
    """x with dims of a sample shape in front of its own."""
    return expand(x, [*shape, *x.shape]) if shape else x
