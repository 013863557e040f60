"""Coordinates on the host, in NumPy: which elements a result stores, where that depends on values of indices.

A place is a coordinate in row-major order, int64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from polyreme.core import state
from polyreme.eager import tape
from polyreme.errors import ShapeError


def constant(array: Any) -> Any:
    """An array as a Tensor outside the tape."""
    return tape.factory.tensor(jnp.asarray(array))


def on_host(x: Any, what: str) -> np.ndarray:
    """The coordinates of a sparse Tensor, [sparse dims, n]. Raises HostValueError inside a capture."""
    indices = x.to_sparse_coo().indices()
    return state.host(indices, f"{what}, whose result stores elements that depend on the values of indices,")


def check_size(shape: Sequence[int]) -> None:
    """Raise ShapeError for a shape of 2**63 elements or more."""
    if math.prod(shape) >= 2**63:
        raise ShapeError(f"a sparse Tensor of shape {list(shape)} has more elements than an int64 can number")


def places_of(indices: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The place of each coordinate [dims, n]."""
    place = np.zeros(indices.shape[1], np.int64)
    for index, size in zip(indices, shape, strict=True):
        place = place * size + index
    return place


def indices_of(places: np.ndarray, shape: Sequence[int], dtype: Any = np.int64) -> np.ndarray:
    """The coordinates of places, [dims, n]."""
    found = []
    for size in reversed(shape):
        found.append(places % max(size, 1))
        places = places // max(size, 1)
    return np.stack(found[::-1]).astype(dtype) if found else np.zeros((0, len(places)), dtype)


def union(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The places in either, sorted, and where in them each of x and each of y went."""
    found, at = np.unique(np.concatenate([x, y]), return_inverse=True)
    return found, at[: len(x)], at[len(x) :]


def product(
    rows: np.ndarray, inner: np.ndarray, other: np.ndarray, columns: np.ndarray, num_columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The pairs of elements that a product of sparse matrices multiplies, and the place of each result.

    rows and inner are the coordinates of the left one, other and columns of the right one. Returned: elements of the
    left and of the right, pair by pair; the places of the result, sorted; which of these each pair is added to.
    """
    order = np.argsort(other, kind="stable")
    starts = np.searchsorted(other[order], inner, side="left")
    counts = np.searchsorted(other[order], inner, side="right") - starts
    left = np.repeat(np.arange(len(inner)), counts)
    within = np.arange(len(left)) - np.repeat(np.cumsum(counts) - counts, counts)
    right = order[np.repeat(starts, counts) + within]
    found, into = np.unique(rows[left] * num_columns + columns[right], return_inverse=True)
    return left, right, found, into
