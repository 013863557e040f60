"""Values on their way between stages: the same layout on the next stage's devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from polyreme.core.devices.abstract import Abstract, mode
from polyreme.core.layout import Layout
from polyreme.eager.host import put
from polyreme.jit.split import Flow
from polyreme.jit.structure import flatten


class Sent(NamedTuple):
    """A value that went to another stage.

    what: "activations", "gradients" (of activations), "parameters" (copies of those that a stage shares) or "parameter
    gradients" (of those copies). source: devices it came from. shape: of one device's piece.
    """

    what: str
    source: frozenset[Any]
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that each device of the source sends."""
        return math.prod(self.shape) * self.dtype.itemsize


_listeners: list[list[Sent]] = []


@contextmanager
def recorded() -> Iterator[list[Sent]]:
    """Inside the block, what stages of this process send each other is added to the list."""
    record: list[Sent] = []
    _listeners.append(record)
    try:
        yield record
    finally:
        _listeners[:] = [other for other in _listeners if other is not record]


def note(what: str, arrays: Iterable[Any]) -> None:
    """Tell those who listen that these arrays are on their way."""
    if _listeners:
        sent = [Sent(what, frozenset(a.sharding.device_set), a.sharding.shard_shape(a.shape), a.dtype) for a in arrays]
        for found in _listeners:
            found += sent


@functools.lru_cache(maxsize=4096)
def _sharding_on(sharding: Any, stage: Layout) -> NamedSharding:
    if not isinstance(sharding, NamedSharding):
        return stage.replicated()
    named = {n for entry in sharding.spec for n in ((entry,) if isinstance(entry, str) else entry or ())}
    if named <= set(stage.mesh.axis_names):
        return NamedSharding(stage.mesh, sharding.spec)
    # of a mesh whose dims a user named: the same grid of this stage's devices
    grid = stage.mesh.devices.reshape(tuple(sharding.mesh.shape.values()))
    return NamedSharding(Mesh(grid, sharding.mesh.axis_names), sharding.spec)


def send(arrays: Sequence[Any], stage: Layout, what: str = "activations") -> list[Any]:
    """The arrays (or None) on another stage, each split there as it was; does not wait for their values.

    what: as in Sent.
    """
    present = [a for a in arrays if a is not None]
    note(what, present)
    moved = iter(move(present, [_sharding_on(a.sharding, stage) for a in present]))
    return [None if a is None else next(moved) for a in arrays]


def move(arrays: Sequence[Any], places: Sequence[Any]) -> list[Any]:
    """The arrays in other places, copied only where they do not lie there already."""
    if mode.is_on:
        return [Abstract.of(a.shape, a.dtype, where) for a, where in zip(arrays, places, strict=True)]
    return jax.device_put(list(arrays), list(places))


def place(value: Any, stage: Layout) -> Flow:
    """A microbatch given as arrays or Tensors in any structure, laid out over a stage by its first dim, the batch."""
    leaves: list[Any] = []
    spec = flatten(value, leaves)
    arrays = [v for v in leaves if isinstance(v, (np.ndarray, jax.Array))]
    places = [stage.activation(("batch", *[None] * (a.ndim - 1)) if a.ndim else (), a.shape) for a in arrays]
    several = stage.mesh.is_multi_process or mode.is_on
    placed = iter(map(put, arrays, places) if several else jax.device_put(arrays, places))
    ours = [next(placed) if isinstance(v, (np.ndarray, jax.Array)) else v for v in leaves]
    return Flow(spec, ours, tuple(False if isinstance(v, (jax.Array, Abstract)) else None for v in ours))


def join(flow: Flow, other: Flow) -> Flow:
    """The pair of both."""
    spec = (tuple, None, (flow.spec, other.spec))
    return Flow(spec, [*flow.leaves, *other.leaves], (*flow.wants, *other.wants))
