"""Functions in the form that other libraries give them: over `dim`, with values and indices together.

Made of the ops, so they run wherever those do. They are public as polyreme.compat's; softmax and split
elsewhere too.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from polyreme.core import dtype as dtypes
from polyreme.core import spelling
from polyreme.core.annotations import AnyTensor, DTypeLike
from polyreme.core.state import TensorState
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops import activation, arithmetic, creation, manipulation, math, reduce, search
from polyreme.ops.indices import gather
from polyreme.ops.matrices import linalg
from polyreme.ops.unique import unique as _unique


class MinMaxRetType(NamedTuple):
    """Extreme values along a dim, and where they are."""

    values: AnyTensor
    indices: AnyTensor


class MedianRetType(NamedTuple):
    """Medians along a dim, and where they are."""

    values: AnyTensor
    indices: AnyTensor


class SortRetType(NamedTuple):
    """Sorted values along a dim, and where they were."""

    values: AnyTensor
    indices: AnyTensor


class SlogdetResult(NamedTuple):
    """Sign and natural logarithm of the magnitude of a determinant."""

    sign: AnyTensor
    logabsdet: AnyTensor


def _spell(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn, taking second names of its parameters (axis for dim) too."""
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount + fn.__code__.co_kwonlyargcount]

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **spelling.renamed(kwargs, names)) if kwargs else fn(*args)

    return run


def _write(result: Any, out: Any, what: str) -> Any:
    """found, written into out if that is given: a Tensor for a Tensor, a pair for a pair."""
    if out is None:
        return result
    if isinstance(result, TensorState):
        return creation.assign(result, out)
    if not isinstance(out, (tuple, list)) or len(out) != len(result):
        raise ConfigError(f"{what}: out must be {len(result)} Tensors ({', '.join(result._fields)}), got {out!r}")
    return type(result)(*(creation.assign(f, o) for f, o in zip(result, out, strict=True)))


@_spell
def softmax(
    input: AnyTensor, dim: int | None = None, dtype: DTypeLike | None = None, out: AnyTensor | None = None
) -> AnyTensor:
    """exp(x) over its sum along dim; without dim, along the first of 0, 1 or 3 dims, along the second of others.

    dtype: what the input is cast to first. nn.functional.softmax takes the last dim instead.
    """
    axis = (0 if input.ndim in (0, 1, 3) else 1) if dim is None else dim
    return activation.softmax(input, axis, dtype, out=out)


@_spell
def equal(input: AnyTensor, other: AnyTensor) -> builtins.bool:
    """Whether two Tensors have one shape and equal elements. Reads the host: raises CaptureError inside a capture."""
    return list(input.shape) == list(other.shape) and builtins.bool(reduce.all(arithmetic.equal(input, other)))


def _extreme(what: str, search_for: Any, over_all: Any, of_two: Any) -> Callable[..., Any]:
    @_spell
    def extreme(
        input: Any, dim: Any = None, keepdim: builtins.bool = False, out: Any = None, *, other: Any = None
    ) -> Any:
        if isinstance(dim, TensorState):
            dim, other = None, dim
        if other is not None:
            if dim is not None or keepdim:
                raise ConfigError(f"{what}: give other, or dim and keepdim, not both")
            return _write(of_two(input, other), out, what)
        if dim is None:
            if keepdim:
                raise ConfigError(f"{what}: keepdim=True without dim; name the dim to keep")
            return _write(over_all(input), out, what)
        index = search_for(input, dim, True)
        return _write(_pick(MinMaxRetType, input, index, dim, keepdim), out, what)

    extreme.__name__ = extreme.__qualname__ = what
    extreme.__doc__ = f"""{what}(x): over all elements; {what}(x, y): of two Tensors, elementwise.

    {what}(x, dim, keepdim=False): (values, indices) along dim; the gradient goes to the element that indices names.
    out: written into, a pair for a pair.
    """
    return extreme


def _pick(kind: Any, x: Any, index: Any, dim: int, keepdim: builtins.bool) -> Any:
    """(values, indices) for one index along dim, whose size in `index` is 1."""
    if x.ndim == 0:
        return kind(x, creation.zeros([], "int64"))
    values = gather.take_along_axis(x, index, dim, False)
    if keepdim:
        return kind(values, index)
    return kind(manipulation.squeeze(values, dim), manipulation.squeeze(index, dim))


max = _extreme("max", search.argmax, reduce.max, math.maximum)
min = _extreme("min", search.argmin, reduce.min, math.minimum)


def _median(what: str, input: Any, dim: int | None, keepdim: builtins.bool, out: Any, ignore: builtins.bool) -> Any:
    x = manipulation.reshape(input, [-1]) if dim is None else input
    axis = 0 if dim is None else dim
    size = x.shape[axis] if x.ndim else 1
    if not size:
        raise ShapeError(f"{what}: no elements along dim {axis} of shape {list(x.shape)}")
    order = search.argsort(x, axis)  # NaN last
    if dtypes.is_floating(x.dtype):
        nans = reduce.sum(arithmetic.cast(math.isnan(x), "int64"), axis, None, True)
        # the lower of two middles; all NaN, or with any of them where they count, the first of them
        middle = (
            (size - nans - 1) // 2
            if ignore
            else math.clip(nans, 0, 1) * (size - nans) + (nans == 0) * ((size - 1) // 2)
        )
        position = math.clip(middle, 0)
    else:
        position = creation.full(
            [1 if i == axis % builtins.max(x.ndim, 1) else n for i, n in enumerate(x.shape)], (size - 1) // 2, "int64"
        )
    index = gather.take_along_axis(order, position, axis, False) if x.ndim else order
    found = _pick(MedianRetType, x, index, axis, keepdim)
    if dim is None:
        return _write(manipulation.reshape(found.values, [1] * input.ndim if keepdim else []), out, what)
    return _write(found, out, what)


@_spell
def median(
    input: AnyTensor, dim: int | None = None, keepdim: builtins.bool = False, out: AnyTensor | None = None
) -> Any:
    """The median of all elements, or (values, indices) along dim: the lower of two middles; NaN if there is one."""
    return _median("median", input, dim, keepdim, out, False)


@_spell
def nanmedian(
    input: AnyTensor, dim: int | None = None, keepdim: builtins.bool = False, out: AnyTensor | None = None
) -> Any:
    """The median of the elements that are not NaN, the lower of two middles; along dim (values, indices)."""
    return _median("nanmedian", input, dim, keepdim, out, True)


@_spell
def slogdet(x: AnyTensor, out: AnyTensor | None = None) -> SlogdetResult:
    """(sign, natural logarithm of the magnitude) of the determinant: [*b, n, n] -> [*b], [*b]."""
    both = linalg.slogdet(x)
    return _write(SlogdetResult(both[0], both[1]), out, "slogdet")


@_spell
def sort(
    input: AnyTensor,
    dim: int = -1,
    descending: builtins.bool = False,
    stable: builtins.bool = False,
    out: AnyTensor | None = None,
) -> SortRetType:
    """(values in order along dim, where each was); NaN counts as largest. Always stable."""
    index = search.argsort(input, dim, descending, stable)
    values = gather.take_along_axis(input, index, dim, False) if input.ndim else input
    return _write(SortRetType(values, index), out, "sort")


@_spell
def split(tensor: Any, split_size_or_sections: Any, dim: int = 0) -> tuple[Any, ...]:
    """Parts along dim, as a tuple: of that many elements, the last one shorter if need be, or of the sizes listed."""
    if not isinstance(split_size_or_sections, int):
        return tuple(manipulation.split(tensor, list(split_size_or_sections), dim))
    size, part = tensor.shape[dim], split_size_or_sections
    if part < 1:
        raise ShapeError(f"split: parts of {part} elements; give 1 or more")
    return tuple(manipulation.split(tensor, [builtins.min(part, size - at) for at in range(0, size, part)] or [0], dim))


@_spell
def unique(
    input: AnyTensor,
    sorted: builtins.bool = True,
    return_inverse: builtins.bool = False,
    return_counts: builtins.bool = False,
    dim: int | None = None,
) -> Any:
    """The distinct elements in increasing order, or slices along dim; then, as asked for, which one each of the input's
    is, in its shape, and how often each occurs. Raises CaptureError inside a capture.
    """
    found = _unique(input, False, return_inverse, return_counts, dim)
    if return_inverse and dim is None:
        values, inverse, *counts = found
        return (values, manipulation.reshape(inverse, input.shape), *counts)
    return found
