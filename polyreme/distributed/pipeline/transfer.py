"""Values on their way between stages: the same layout on the next stage's devices.

Floor: 5.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from polyreme.core.layout import Layout
from polyreme.eager.host import put
from polyreme.jit.split import Flow
from polyreme.jit.structure import flatten


@functools.lru_cache(maxsize=4096)
def _on(sharding: Any, stage: Layout) -> NamedSharding:
    return NamedSharding(stage.mesh, sharding.spec) if isinstance(sharding, NamedSharding) else stage.replicated()


def send(arrays: Sequence[Any], stage: Layout) -> list[Any]:
    """The arrays (or None) on another stage, each split there as it was; does not wait for their values."""
    present = [a for a in arrays if a is not None]
    moved = iter(jax.device_put(present, [_on(a.sharding, stage) for a in present]))
    return [None if a is None else next(moved) for a in arrays]


def place(value: Any, stage: Layout) -> Flow:
    """A microbatch given as arrays or Tensors in any structure, laid out over a stage by its first dim, the batch."""
    leaves: list[Any] = []
    spec = flatten(value, leaves)
    arrays = [v for v in leaves if isinstance(v, (np.ndarray, jax.Array))]
    places = [stage.activation(("batch", *[None] * (a.ndim - 1)) if a.ndim else (), a.shape) for a in arrays]
    several = stage.mesh.is_multi_process
    placed = iter(map(put, arrays, places) if several else jax.device_put(arrays, places))
    ours = [next(placed) if isinstance(v, (np.ndarray, jax.Array)) else v for v in leaves]
    return Flow(spec, ours, tuple(False if isinstance(v, jax.Array) else None for v in ours))


def join(flow: Flow, other: Flow) -> Flow:
    """The pair of both."""
    spec = (tuple, None, (flow.spec, other.spec))
    return Flow(spec, [*flow.leaves, *other.leaves], (*flow.wants, *other.wants))
