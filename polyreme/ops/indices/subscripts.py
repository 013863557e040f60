"""Reading and writing parts of a Tensor by Python index expressions.

An index is split into a static spec (slices, new dims) and arrays (integers too, so that x[i] in a loop
compiles once). Spec entries: ("int",), ("array",), ("new",), ("all",), ("slice", start, stop, step).

Arrays take the place of their dims if they stand side by side once ints are taken, else they come first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core.op import op
from polyreme.core.sharding_rule import OpCall, ShardingRule
from polyreme.errors import DTypeError, ShapeError
from polyreme.ops.by_index import read, write
from polyreme.ops.sharding import like_first

Spec = tuple[tuple, ...]


def _index(arrays: list[Array], spec: Spec) -> tuple:
    rest = iter(arrays)
    index: list[Any] = []
    for entry in spec:
        match entry[0]:
            case "int" | "array":
                index.append(next(rest))
            case "new":
                index.append(None)
            case "all":
                index.append(Ellipsis)
            case _:
                index.append(slice(*entry[1:]))
    return tuple(index)


def _dims_of_arrays(arrays: list[Array], spec: Spec) -> tuple[int, int]:
    """(how many dims the arrays have together, where in the result they belong), where NumPy has them first because an
    int, which it counts as an array, stands apart from them; (0, 0) where NumPy has them right."""
    rest = iter(arrays)
    kinds = ["slice" if entry[0] not in ("int", "array") else next(rest).ndim for entry in spec]
    every = [at for at, kind in enumerate(kinds) if kind != "slice"]
    wide = [at for at in every if kinds[at]]
    apart = any(kinds[at] == "slice" for at in range(every[0], every[-1])) if every else False
    if not apart or not wide or any(kinds[at] == "slice" for at in range(wide[0], wide[-1])):
        return 0, 0
    before = kinds[: wide[0]].count("slice")
    return max(kinds[at] for at in wide), before


def _without_all(spec: Spec, x: Array) -> Spec:
    """spec with a slice for each dim that its "all" stands for."""
    taken = sum(entry[0] in ("int", "array", "slice") for entry in spec)
    whole = (("slice", None, None, None),) * (x.ndim - taken)
    return tuple(part for entry in spec for part in (whole if entry[0] == "all" else (entry,)))


def _move_dims(x: Array, many: int, to: int, *, back: bool = False) -> Array:
    first, place = tuple(range(many)), tuple(range(to, to + many))
    return jnp.moveaxis(x, place, first) if back else jnp.moveaxis(x, first, place)


def _getitem_rule(call: OpCall) -> ShardingRule | None:
    """Dims taken whole (":") go through, if no array is among the indexes."""
    spec, shape = call.attrs["spec"], call.shapes[0]
    if any(entry[0] == "array" for entry in spec):
        return None
    indexed = sum(entry[0] in ("int", "slice") for entry in spec)
    if not any(entry[0] == "all" for entry in spec):
        spec = (*spec, ("all",))
    names: list[str | None] = [None] * len(shape)
    out: list[str | None] = []
    dim = 0
    for entry in spec:
        if entry[0] == "new":
            out.append(None)
        elif entry[0] == "int":
            dim += 1
        else:
            for _ in range(len(shape) - indexed if entry[0] == "all" else 1):
                if entry[0] == "all" or entry[1:] in ((None, None, None), (None, None, 1)):
                    names[dim] = f"d{dim}"
                out.append(names[dim])
                dim += 1
    return ShardingRule(call.inputs(x=tuple(names)), (tuple(out),))


@op(method=False, rule=_getitem_rule)
def getitem(x: Array, arrays: list[Array], spec: tuple[Any, ...]) -> Array:
    """x[index]; spec and arrays as the module describes them. Out of range: NaN, or the lowest integer; see ops.ids."""
    # plain ints were checked where they were written, and need no mask
    index = _index(arrays, spec)
    ranged = any(entry[0] == "array" for entry in spec)
    if not ranged:
        return x.at[index].get(mode="promise_in_bounds")
    many, to = _dims_of_arrays(arrays, _without_all(spec, x))
    return _move_dims(read(x, index), many, to) if to else read(x, index)


@op(method=False, rule=like_first())
def setitem(x: Array, value: Array, arrays: list[Array], spec: tuple[Any, ...]) -> Array:
    """A copy of x with x[index] = value, value broadcast and cast to x's dtype."""
    index = _index(arrays, spec)
    value = _keep(value, x)
    many, to = _dims_of_arrays(arrays, _without_all(spec, x))
    room = jax.eval_shape(lambda x, arrays: _move_dims(x[_index(arrays, spec)], many, to), x, arrays).shape
    # NumPy lets a value have extra leading dims of size 1
    if value.ndim > len(room):
        value = jnp.reshape(value, value.shape[value.ndim - len(room) :])
    if any(size not in (1, wanted) for size, wanted in zip(value.shape[::-1], room[::-1], strict=False)):
        raise ShapeError(
            f"x[index] = value: the index selects {list(room)} of x {list(x.shape)}, which a value of shape "
            f"{list(value.shape)} does not fill; make its dims equal or 1"
        )
    if to:
        value = _move_dims(jnp.broadcast_to(value, room), many, to, back=True)
    return write(x, index, value)


@op(method=False, rule=like_first())
def setitem_where(x: Array, value: Array, mask: Array) -> Array:
    """A copy of x with value, broadcast, in each place where mask is True; mask covers the leading dims, value at most
    the others. Raises ShapeError."""
    room = x.shape[mask.ndim :]
    if value.ndim > len(room) or any(
        size not in (1, wanted) for size, wanted in zip(value.shape[::-1], room[::-1], strict=False)
    ):
        raise ShapeError(
            f"x[mask] = value: each place of the mask is {list(room)} of x {list(x.shape)}, which a value of shape "
            f"{list(value.shape)} does not fill; make its dims equal or 1"
        )
    mask = mask.reshape(mask.shape + (1,) * len(room))
    return jnp.where(mask, _keep(value, x), x)


def _keep(value: Array, x: Array) -> Array:
    """value in x's dtype. Raises DTypeError rather than drop imaginary parts."""
    if dtypes.is_complex(value.dtype) and not dtypes.is_complex(x.dtype):
        raise DTypeError(
            f"x[index] = value: the value is {value.dtype.name}, x {x.dtype.name}, which holds no imaginary part; "
            "write value.real(), or make x complex with astype"
        )
    return dtypes.convert(value, x.dtype)
