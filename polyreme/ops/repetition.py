"""Repeating elements: tile, expand and broadcast, repeat_interleave, products and combinations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.annotations import AnyTensor
from polyreme.core.dtype import promote
from polyreme.core.op import composite, op
from polyreme.core.state import TensorState
from polyreme.errors import ShapeError
from polyreme.ops.bounds import at_hand, dim_of, ints
from polyreme.ops.by_index import read
from polyreme.ops.sharding import grows


@op(rule=grows)
def tile(x: Array, repeat_times: Sequence[int]) -> Array:
    """x repeated that many times along each dim; of unequal lengths the shorter, shape or repeats, gets 1s in front."""
    times = ints(repeat_times)
    if any(n < 0 for n in times):
        raise ShapeError(f"tile: repeat_times {list(times)} must be >= 0")
    return jnp.tile(x, times)


def _expand(asked: tuple[int, ...], have: tuple[int, ...], what: str) -> tuple[int, ...]:
    extra = len(asked) - len(have)
    if extra < 0 or any(n < 0 and (n != -1 or i < extra) for i, n in enumerate(asked)):
        raise ShapeError(
            f"{what}: shape {list(asked)} for {list(have)}; needs every dim, -1 only where x has one to keep"
        )
    shape = tuple(have[i - extra] if n == -1 else n for i, n in enumerate(asked))
    if any(have[i - extra] not in (1, n) for i, n in enumerate(shape) if i >= extra):
        raise ShapeError(f"{what}: {list(have)} to {list(asked)}; only dims of size 1 grow")
    return shape


@op(rule=grows)
def expand(x: Array, shape: Sequence[int]) -> Array:
    """x with dims of size 1 repeated to the sizes in shape, and new ones in front; -1 keeps a dim."""
    return jnp.broadcast_to(x, _expand(ints(shape), x.shape, "expand"))


@op(rule=grows)
def broadcast_to(x: Array, shape: Sequence[int]) -> Array:
    """x with dims of size 1 repeated to the sizes in shape, and new ones in front; -1 keeps a dim."""
    return jnp.broadcast_to(x, _expand(ints(shape), x.shape, "broadcast_to"))


@composite
def expand_as(x: AnyTensor, y: AnyTensor, name: str | None = None) -> AnyTensor:
    """expand(x, the shape of y)."""
    return expand(x, y.shape)


@composite
def broadcast_shapes(*shapes: Sequence[int]) -> list[int]:
    """The shape that Tensors of these shapes broadcast to; raises ShapeError if they do not.

    >>> broadcast_shapes([2, 1, 3], [4, 1])
    [2, 4, 3]
    """
    try:
        return list(np.broadcast_shapes(*(tuple(s) for s in shapes)))
    except ValueError:
        raise ShapeError(
            f"broadcast_shape: {', '.join(str(list(s)) for s in shapes)} differ in a dim that is not 1"
        ) from None


@composite
def broadcast_shape(x_shape: Sequence[int], y_shape: Sequence[int]) -> list[int]:
    """The shape that Tensors of two shapes broadcast to; raises ShapeError if they do not."""
    return broadcast_shapes(x_shape, y_shape)


@op
def broadcast_tensors(input: list[Array]) -> list[Array]:
    """Every Tensor expanded to the one shape they broadcast to."""
    shape = broadcast_shapes(*(a.shape for a in input))
    return [jnp.broadcast_to(a, shape) for a in input]


@op(method=False)
def repeat_each(x: Array, repeats: int, axis: int | None) -> Array:
    """Every slice along axis `repeats` times in a row; without axis every element, flattened."""
    if axis is None:
        x, axis = x.reshape(-1), 0
    if repeats < 0:
        raise ShapeError(f"repeat_interleave: repeats={repeats} must be >= 0")
    return jnp.repeat(x, repeats, dim_of(axis, x.ndim, "repeat_interleave"))


@op(method=False)
def repeat_by(x: Array, repeats: Array, axis: int | None, output_size: int) -> Array:
    """Slice i along axis repeats[i] times in a row, output_size in all."""
    if axis is None:
        x, axis = x.reshape(-1), 0
    dim = dim_of(axis, x.ndim, "repeat_interleave")
    repeats = jnp.atleast_1d(repeats)
    if repeats.shape not in ((x.shape[dim],), (1,)):
        raise ShapeError(
            f"repeat_interleave: repeats {list(repeats.shape)} for dim {dim} of {list(x.shape)}; give one a slice"
        )
    slices = jnp.repeat(jnp.arange(x.shape[dim], dtype=dtypes.int32), repeats, total_repeat_length=output_size)
    return read(x, (slice(None),) * dim + (slices,), mode="promise_in_bounds")


@composite
def repeat_interleave(
    x: AnyTensor, repeats: Any, axis: int | None = None, name: str | None = None, output_size: int | None = None
) -> AnyTensor:
    """Slice i along axis repeats[i] times in a row (repeats an int: all alike); without axis the elements, flattened.

    The sum of repeats is read on the host unless output_size says it; a wrong output_size raises ShapeError where the
    repeats are at hand, else it cuts, or repeats the last slice.
    """
    if isinstance(repeats, int):
        result = repeat_each(x, repeats, axis)
        if output_size not in (None, result.shape[axis or 0]):
            raise ShapeError(f"repeat_interleave: output_size={output_size}, but there are {result.shape[axis or 0]}")
        return result
    known = at_hand(repeats)
    if known is None and output_size is None:
        known = state.host(repeats, "repeat_interleave() without output_size, whose shape is only known on the host")
    if known is not None:
        count = (
            known.sum() if known.size != 1 else known.sum() * (math.prod(x.shape) if axis is None else x.shape[axis])
        )
        if (known < 0).any() or output_size not in (None, int(count)):
            raise ShapeError(
                f"repeat_interleave: repeats must be >= 0 and sum to output_size={output_size}, they sum to {count}"
            )
        output_size = int(count)
    return repeat_by(x, repeats if isinstance(repeats, TensorState) else np.asarray(repeats), axis, output_size)


@op(method=False)
def cartesian_prod(x: list[Array]) -> Array:
    """All ways to take one element of each 1-D Tensor -> [their number, len(x)], the last one varying fastest.

    Of a single Tensor, itself.
    """
    if not x or any(a.ndim != 1 for a in x):
        raise ShapeError(f"cartesian_prod: takes 1-D Tensors, got {[list(a.shape) for a in x]}")
    grids = jnp.meshgrid(*promote(*x), indexing="ij")
    return jnp.stack([g.reshape(-1) for g in grids], -1) if len(x) > 1 else x[0]


@op
def combinations(x: Array, r: int = 2, with_replacement: bool = False) -> Array:
    """All ways to take r elements of a 1-D Tensor, order aside -> [their number, r], in order of position."""
    if x.ndim != 1 or r < 0:
        raise ShapeError(f"combinations: takes a 1-D Tensor and r >= 0, got {list(x.shape)} and r={r}")
    if r == 0:
        return jnp.zeros((0,), x.dtype)
    ways = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    return x[np.array(list(ways(range(x.shape[0]), r)), np.int64).reshape(-1, r)]
