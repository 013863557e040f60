"""Checking integers against a range: indices, ids and labels. One place for every op that takes them.

Floor: 2.  Eager code raises IndexError at once, which waits for the device. In captured code there are no values yet:
in the checked mode (core.checked) the program looks when it runs; otherwise a read gives NaN and a write is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import state
from polyreme.core.checked import checked, layer_here, verify
from polyreme.core.state import TensorState, Tracer

Describe = Callable[[int, tuple[int, ...]], str]


def visible(x: Any) -> np.ndarray | None:
    """The value of a Tensor, array or nested list; None where it cannot be seen now.

    That is inside a captured function, in a recorded Program, and of an array that other processes hold a part of.
    """
    if isinstance(x, TensorState):
        if state.capturing():
            return None
        x = x._array
    if isinstance(x, Tracer):
        return None
    if isinstance(x, jax.Array):
        return np.asarray(x) if x.is_fully_addressable else None
    return np.asarray(x) if isinstance(x, (np.ndarray, np.generic, list, tuple, int)) else None


def check_within(x: Any, low: int, size: int, describe: Describe, allowed: int | None = None) -> None:
    """Raise IndexError unless every integer of x is in [low, size) or is `allowed`: at once, or in the checked mode.

    describe: (the first one that is not, its place in x) -> what the error says.
    """
    seen = visible(x)
    if seen is None:
        if checked.on and not state.recording():
            _check_later(x, low, size, describe, allowed)
        return
    # the common case: two passes over the integers, no mask
    if seen.dtype.kind not in "iu" or not seen.size or (seen.min() >= low and seen.max() < size):
        return
    error = _error(_outside(seen, low, size, allowed, np), seen.shape, describe)
    if error is not None:
        raise error


def _check_later(x: Any, low: int, size: int, describe: Describe, allowed: int | None) -> None:
    array = state.read(x) if isinstance(x, TensorState) else x
    if not isinstance(array, (jax.Array, Tracer)) or array.dtype.kind not in "iu" or not array.size:
        return
    shape = array.shape

    def found(facts: np.ndarray, place: str) -> BaseException | None:
        error = _error(facts, shape, describe)
        return error and IndexError(f"{error}; {place} (FLAGS_check_nan_inf)")

    verify(_outside(array, low, size, allowed, jnp), found, layer_here())


def _outside(x: Any, low: int, size: int, allowed: int | None, xp: Any) -> Any:
    """[whether some integer is outside, the first that is, its place in the flattened x]."""
    flat = x.reshape(-1).astype("int64")
    bad = (flat < low) | (flat >= size)
    if allowed is not None:
        bad &= flat != allowed
    at = xp.argmax(bad)
    return xp.stack([bad.any().astype(flat.dtype), flat[at], at.astype(flat.dtype)])


def _error(facts: np.ndarray, shape: tuple[int, ...], describe: Describe) -> IndexError | None:
    is_bad, value, at = (int(f) for f in facts)
    return IndexError(describe(value, tuple(int(i) for i in np.unravel_index(at, shape)))) if is_bad else None


def check_range(x: Any, size: int, what: str, allowed: int | None = None) -> None:
    """Raise IndexError if an id is below 0 or not below size, and is not `allowed`; see check_within for when."""

    def describe(value: int, at: tuple[int, ...]) -> str:
        besides = "" if allowed is None else f" or {allowed}"
        return f"{what}: {value} at {list(at)} is out of range; needs 0 <= id < {size}{besides}"

    check_within(x, 0, size, describe, allowed)
