"""Checking integers against a range: indices, ids and labels. One place for every op that takes them.

Eager code raises IndexError at once, which waits for the device. In captured code there are no values yet:
in the checked mode (core.checked) the program looks when it runs; otherwise a read gives NaN and a write is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.call_site import layer_note
from polyreme.core import state
from polyreme.core.checked import checked, layer_here, verify
from polyreme.core.state import TensorState, Tracer

Describe = Callable[[int, tuple[int, ...]], Exception]


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


def check_none(bad: Callable[..., Any], values: Sequence[Any], describe: Describe) -> None:
    """Raise describe(value, its place in the first of given) if bad holds anywhere: at once, or in the checked mode.

    given: integers, with what else tells which of them are bad. bad: (np or jnp, *arrays) -> a mask like the first.
    """
    if any(not np.size(x) if isinstance(x, (list, tuple)) else 0 in getattr(x, "shape", ()) for x in values):
        return
    seen = [visible(x) for x in values]
    known = [x for x in seen if x is not None]
    if len(known) == len(seen):
        _raise_if(_first(np, bad(np, *known), known[0]), known[0].shape, describe)
    elif checked.is_on and not state.recording():
        arrays = [jnp.asarray(state.read(x) if isinstance(x, TensorState) else x) for x in values]
        shape = arrays[0].shape

        def found(facts: np.ndarray, place: str) -> BaseException | None:
            error = _error(facts, shape, describe)
            return error and type(error)(f"{error}; {place} (FLAGS_check_nan_inf)")

        verify(_first(jnp, bad(jnp, *arrays), arrays[0]), found, layer_here())


def _first(xp: Any, mask: Any, x: Any) -> Any:
    """[whether mask holds anywhere, the first of x where it does, its place in the flattened x]."""
    flat, at = x.reshape(-1).astype("int64"), xp.argmax(mask.reshape(-1))
    return xp.stack([mask.any().astype(flat.dtype), flat[at], at.astype(flat.dtype)])


def _error(facts: Any, shape: tuple[int, ...], describe: Describe) -> Exception | None:
    is_bad, value, at = (int(f) for f in facts)
    return describe(value, tuple(int(i) for i in np.unravel_index(at, shape))) if is_bad else None


def _raise_if(facts: Any, shape: tuple[int, ...], describe: Describe) -> None:
    error = _error(facts, shape, describe)
    if error is not None:
        if where := layer_note():
            error.add_note(where)
        raise error


def check_within(x: Any, low: int, size: int, describe: Describe, allowed: int | None = None) -> None:
    """check_none for integers that are outside of [low, size) and not `allowed`; what has other dtypes passes."""
    seen = visible(x)
    if seen is not None:
        # the common case: two passes over the integers, no mask
        if seen.dtype.kind not in "iu" or not seen.size or (seen.min() >= low and seen.max() < size):
            return
    elif not checked.is_on or x.dtype.kind not in "iu" or not np.prod(x.shape):
        return

    def outside(_: Any, x: Any) -> Any:
        wide = x.astype("int64")
        return ((wide < low) | (wide >= size)) & (True if allowed is None else wide != allowed)

    check_none(outside, [x], describe)


def check_range(x: Any, size: int, what: str, allowed: int | None = None) -> None:
    """Raise IndexError if an id is below 0 or not below size, and is not `allowed`; see check_none for when."""

    def describe(value: int, at: tuple[int, ...]) -> Exception:
        besides = "" if allowed is None else f" or {allowed}"
        return IndexError(f"{what}: {value} at {list(at)} is out of range; needs 0 <= id < {size}{besides}")

    check_within(x, 0, size, describe, allowed)
