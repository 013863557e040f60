"""Making Tensors: filled, counted and diagonal ones, triangles, grids, copies.

Where a size decides the result's shape it is a static attribute; a fill value is an argument of the program,
so that another value does not compile again.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax import export as jax_export
from jax.core import max_dim

from polyreme.core import dtype as dtypes
from polyreme.core import spelling, state
from polyreme.core.annotations import AnyTensor, DTypeLike, ShapeLike
from polyreme.core.devices import place as places
from polyreme.core.dtype import promote, promote_floating
from polyreme.core.op import OPS, op
from polyreme.core.sharding_rule import RuleFor
from polyreme.core.symbol import refuse_sizes
from polyreme.errors import CaptureError, ConfigError, ShapeError
from polyreme.ops.bounds import preceded
from polyreme.ops.sharding import elementwise, elementwise_sum, like_first


def republish(declared: Callable[..., Any], public: Callable[..., Any]) -> Callable[..., Any]:
    """Make public what users call for an op: same name, docs and declaration, another way of taking arguments."""
    taking = public if public.__code__.co_flags & inspect.CO_VARKEYWORDS else _spell(public)
    functools.update_wrapper(taking, declared)
    taking.__wrapped__ = declared if taking is public else public  # type: ignore[attr-defined]  (for its signature)
    taking.op = declared.op  # type: ignore[attr-defined]
    OPS[declared.__name__] = taking
    return taking


def _spell(public: Callable[..., Any]) -> Callable[..., Any]:
    """public, taking second names of its parameters too."""
    code = public.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    def run(*args: Any, **kwargs: Any) -> Any:
        return public(*args, **spelling.renamed(kwargs, names)) if kwargs else public(*args)

    return run


def creator(fn: Callable[..., Any] | None = None, *, rule: RuleFor | None = None) -> Any:
    """Declare an op that makes Tensors: its public function also takes device, requires_grad and pin_memory.

    device: where the result goes, the default device if None. requires_grad: the result wants a gradient. rule: as of
    op.
    """
    if fn is None:
        return functools.partial(creator, rule=rule)
    declared = op(fn, method=False, rule=rule, integers="any", constant=True)
    sized = fn.__code__.co_varnames[:2] == ("shape", "dtype")

    def public(
        *args: Any, device: Any = None, requires_grad: bool = False, pin_memory: bool = False, **kwargs: Any
    ) -> Any:
        if sized and len(args) > 1 and all(isinstance(n, int) for n in args):
            args = (args,)  # zeros(2, 3)
        if pin_memory:
            raise ConfigError(f"{fn.__name__}: pin_memory=True; transfers pin memory themselves here, leave it out")
        with _device_context(device, fn.__name__):
            result = declared(*args, **kwargs)
        if requires_grad:
            result.stop_gradient = False
        return result

    return republish(declared, public)


@contextmanager
def _device_context(device: Any, what: str) -> Iterator[None]:
    if device is None:
        yield
        return
    if state.capturing():
        raise CaptureError(f"{what}: device={device!r} in a captured function, which is one program on its own devices")
    with jax.default_device(places.as_place(device).device()):
        yield


def as_shape(shape: Any, what: str) -> tuple[int, ...]:
    """A shape given as an int or a sequence of ints. Raises ShapeError for negative sizes and what is no integer."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    for size in sizes:
        if jax_export.is_symbolic_dim(size):  # open in an export
            continue
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise ShapeError(f"{what}: shape {list(sizes)} needs integers >= 0, got {size!r}")
    return sizes


def as_float(dtype: Any) -> np.dtype:
    """The dtype asked for, or the default floating one."""
    return dtypes.default_dtype() if dtype is None else dtypes.as_dtype(dtype)


def _or_own(x: Array, dtype: Any) -> np.dtype:
    return x.dtype if dtype is None else dtypes.as_dtype(dtype)


@creator
def zeros(shape: ShapeLike, dtype: DTypeLike | None = None) -> Array:
    """Zeros of a shape; dtype is the default one if None."""
    return jnp.zeros(as_shape(shape, "zeros"), as_float(dtype))


@creator
def ones(shape: ShapeLike, dtype: DTypeLike | None = None) -> Array:
    """Ones of a shape; dtype is the default one if None."""
    return jnp.ones(as_shape(shape, "ones"), as_float(dtype))


def _check_full(shape: Any, fill_value: Any, dtype: Any = None, *_: Any, **options: Any) -> Any:
    if isinstance(fill_value, str):
        return full(shape, _number(fill_value, "full"), dtype, **options)
    return dtypes.check_holds("full: fill_value", as_float(dtype), fill_value)


@preceded(_check_full)
@creator
def full(shape: ShapeLike, fill_value: Array, dtype: DTypeLike | None = None) -> Array:
    """A shape filled with one value; without dtype bool and complex values keep theirs, others give the default one.

    fill_value: a number, "inf", "-inf" or "nan" too, or one element. Raises ConfigError for a number that dtype does
    not hold.
    """
    kept = fill_value.dtype == dtypes.bool_ or dtypes.is_complex(fill_value.dtype)
    to = fill_value.dtype if dtype is None and kept else as_float(dtype)
    value = dtypes.convert(fill_value, to)
    return jnp.broadcast_to(jnp.reshape(value, ()), as_shape(shape, "full"))


@creator
def empty(shape: ShapeLike, dtype: DTypeLike | None = None) -> Array:
    """A Tensor of a shape to be written to later; it holds zeros."""
    return jnp.zeros(as_shape(shape, "empty"), as_float(dtype))


@creator(rule=elementwise)
def zeros_like(x: Array, dtype: DTypeLike | None = None) -> Array:
    """Zeros of x's shape, and of its dtype unless another is given."""
    return jnp.zeros(x.shape, _or_own(x, dtype))


@creator(rule=elementwise)
def ones_like(x: Array, dtype: DTypeLike | None = None) -> Array:
    """Ones of x's shape, and of its dtype unless another is given."""
    return jnp.ones(x.shape, _or_own(x, dtype))


def _number(text: str, what: str) -> float:
    """The number that a text says: "-inf", "1e3"."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f'{what}: fill_value={text!r} is no number; give one, or "inf", "-inf", "nan"') from None


def _check_full_like(x: Any, fill_value: Any, dtype: Any = None, *_: Any, **options: Any) -> Any:
    if isinstance(fill_value, str):
        return full_like(x, _number(fill_value, "full_like"), dtype, **options)
    own = x.dtype if dtype is None else dtypes.as_dtype(dtype)
    return (
        dtypes.check_holds("full_like: fill_value", own, fill_value) if fill_value.__class__ in (int, float) else None
    )


@preceded(_check_full_like)
@creator(rule=elementwise)
def full_like(x: Array, fill_value: Array, dtype: DTypeLike | None = None) -> Array:
    """One value in x's shape, and in its dtype unless another is given, which must hold it: ConfigError."""
    return jnp.broadcast_to(dtypes.convert(jnp.reshape(fill_value, ()), _or_own(x, dtype)), x.shape)


@creator(rule=elementwise)
def empty_like(x: Array, dtype: DTypeLike | None = None) -> Array:
    """A Tensor of x's shape and dtype to be written to later; it holds zeros."""
    return jnp.zeros(x.shape, _or_own(x, dtype))


@creator
def arange(start: float = 0, end: float | None = None, step: float = 1, dtype: DTypeLike | None = None) -> Array:
    """start, start + step, ... up to but not including end; arange(n) counts from 0.

    -> [ceil((end - start) / step)]; int64 if all three are integers, else the default dtype. Raises for step 0.
    """
    if end is None:
        start, end = 0, start
    if step == 0:
        raise ShapeError(f"arange(start={start}, end={end}, step=0): step 0 never arrives; give another step")
    is_open = any(map(jax_export.is_symbolic_dim, (start, end)))
    whole = all(isinstance(v, int) or jax_export.is_symbolic_dim(v) for v in (start, end, step))
    to = dtypes.as_dtype(dtype) if dtype is not None else dtypes.int64 if whole else dtypes.default_dtype()
    if is_open and whole:
        count: Any = max_dim(-((start - end) // step), 0)
    else:
        count = max(0, math.ceil((end - start) / step))
    return _count_up("arange", start, step, count, whole, to)


def _count_up(what: str, start: Any, step: Any, count: Any, whole: bool, to: np.dtype) -> Array:
    """start, start + step, ... -> [count]; raises ConfigError for one that the dtype does not hold."""
    values = (start, start + (count - 1) * step) if jax_export.is_symbolic_dim(count) or count else ()
    for value in (v for v in values if not jax_export.is_symbolic_dim(v)):
        dtypes.check_holds(what, to, value)
    steps = jnp.arange(count, dtype=dtypes.int64 if whole else dtypes.float64)
    return (start + steps * step).astype(to)


@creator
def range(start: float = 0, end: float | None = None, step: float = 1, dtype: DTypeLike | None = None) -> Array:
    """start, start + step, ... up to and including end; range(n) counts from 0 to n. arange leaves the end out.

    -> [floor((end - start) / step) + 1]; the default dtype if None. Raises ShapeError for step 0, or one that leads
    away from end.
    """
    if end is None:
        start, end = 0, start
    if step == 0 or (end - start) / step < 0:
        raise ShapeError(f"range(start={start}, end={end}, step={step}): step never arrives; give another")
    count = math.floor((end - start) / step) + 1
    whole = all(isinstance(v, int) for v in (start, end, step))
    return _count_up("range", start, step, count, whole, as_float(dtype))


@creator
def linspace(start: Array, stop: Array, num: int, dtype: DTypeLike | None = None) -> Array:
    """num values evenly spaced from start to stop, both included -> [num]; default dtype if None.

    Raises ShapeError for num < 1.
    """
    return _space(start, stop, num, "linspace").astype(as_float(dtype))


def _space(start: Array, stop: Array, num: int, what: str) -> Array:
    if num < 1:
        raise ShapeError(f"{what}: num={num}; ask for at least 1 value")
    first, last = (jnp.reshape(v, ()).astype(dtypes.float64) for v in (start, stop))
    if num == 1:
        return first[None]
    # whole steps give whole numbers, which jnp.linspace's mean of both ends leaves to how a device rounds
    values = first + jnp.arange(num, dtype=dtypes.float64) * ((last - first) / (num - 1))
    return values.at[-1].set(last)


@op(method=False)
def logspace(start: Array, stop: Array, num: int, base: Array | float = 10.0, dtype: DTypeLike | None = None) -> Array:
    """base to the powers linspace(start, stop, num) -> [num]; default dtype if None."""
    powers = _space(start, stop, num, "logspace")
    return jnp.power(jnp.reshape(base, ()).astype(dtypes.float64), powers).astype(as_float(dtype))


@creator
def eye(num_rows: int, num_columns: int | None = None, dtype: DTypeLike | None = None) -> Array:
    """Ones on the main diagonal, zeros elsewhere -> [num_rows, num_columns]; square if num_columns is None."""
    rows, columns = as_shape((num_rows, num_rows if num_columns is None else num_columns), "eye")
    return jnp.eye(rows, columns, dtype=as_float(dtype))


@op
def diag(x: Array, offset: int = 0, padding_value: Array | float = 0) -> Array:
    """[n] -> the square matrix with x on a diagonal and padding_value elsewhere; [m, n] -> its diagonal.

    offset: the diagonal, above the main one if positive. Raises ShapeError for other numbers of dims.
    """
    if x.ndim not in (1, 2):
        raise ShapeError(f"diag takes 1 or 2 dims, got shape {list(x.shape)}; diag_embed and diagonal take more")
    if x.ndim == 2:
        return jnp.diagonal(x, offset)
    rows, columns, size = _diagonal(x.shape[0], offset)
    padding = jnp.broadcast_to(jnp.reshape(padding_value, ()).astype(x.dtype), (size, size))
    return padding.at[rows, columns].set(x)


def _diagonal(n: int, offset: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows and columns of n elements on a diagonal, and the size of the square that holds them."""
    return np.arange(n) + max(-offset, 0), np.arange(n) + max(offset, 0), n + abs(offset)


@op
def diagflat(x: Array, offset: int = 0) -> Array:
    """The elements of x, row by row, on a diagonal of a square matrix of zeros."""
    rows, columns, size = _diagonal(x.size, offset)
    return jnp.zeros((size, size), x.dtype).at[rows, columns].set(x.reshape(-1))


@op
def diag_embed(input: Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Array:
    """The last dim laid on a diagonal of two new dims: [*b, n] -> [*b, n + |offset|, n + |offset|].

    dim1, dim2: where the rows and columns of the diagonal stand in the result.
    """
    rows, columns, size = _diagonal(input.shape[-1], offset)
    square = jnp.zeros((*input.shape[:-1], size, size), input.dtype).at[..., rows, columns].set(input)
    return jnp.moveaxis(square, (-2, -1), (dim1, dim2))


@op
def diagonal(x: Array, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Array:
    """Elements of x whose index in axis2 is their index in axis1 plus offset; the diagonal becomes the last dim."""
    return jnp.diagonal(x, offset, axis1, axis2)


@op(inplace=True, rule=like_first("moves"))
def tril(x: Array, diagonal: int = 0) -> Array:
    """[*b, m, n] with zeros above a diagonal."""
    return jnp.tril(x, diagonal)


@op(inplace=True, rule=like_first("moves"))
def triu(x: Array, diagonal: int = 0) -> Array:
    """[*b, m, n] with zeros below a diagonal."""
    return jnp.triu(x, diagonal)


def _check_sizes(what: str, row: int, col: int) -> None:
    if row < 0 or col < 0:
        raise ShapeError(f"{what}: row={row}, col={col}; sizes are at least 0")


@op(method=False)
def tril_indices(row: int, col: int, offset: int = 0, dtype: DTypeLike = "int64") -> Array:
    """Rows and columns of the elements on and below a diagonal of a [row, col] matrix -> [2, count].

    Raises ShapeError for sizes below 0.
    """
    _check_sizes("tril_indices", row, col)
    return jnp.asarray(np.stack(np.tril_indices(row, offset, col)).astype(dtypes.as_dtype(dtype)))


@op(method=False)
def triu_indices(row: int, col: int | None = None, offset: int = 0, dtype: DTypeLike = "int64") -> Array:
    """Rows and columns of the elements on and above a diagonal of a [row, col] matrix -> [2, count].

    Raises ShapeError for sizes below 0.
    """
    _check_sizes("triu_indices", row, row if col is None else col)
    return jnp.asarray(np.stack(np.triu_indices(row, offset, col)).astype(dtypes.as_dtype(dtype)))


@op(method=False)
def meshgrid(inputs: list[Array], indexing: str = "ij") -> list[Array]:
    """Coordinates of a grid: n vectors (a 0-D Tensor is one element) -> n Tensors [len(vector 0), len(vector 1), ...].

    Called as meshgrid(x, y) or meshgrid([x, y]). indexing "xy" swaps the first two dims of the result.
    """
    for x in inputs:
        if x.ndim > 1:
            raise ShapeError(f"meshgrid takes vectors, got one of shape {list(x.shape)}")
    return list(jnp.meshgrid(*map(jnp.atleast_1d, inputs), indexing=indexing))


_grid = meshgrid


def _meshgrid(*args: AnyTensor, indexing: str = "ij", name: str | None = None) -> list[AnyTensor]:
    inputs = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
    return _grid(list(inputs), indexing=indexing)


meshgrid = republish(_grid, _meshgrid)


@op(method=False, rule=elementwise_sum)
def assign(x: Array) -> Array:
    """A copy of a Tensor, ndarray, list or number; written into output if one is given. Gradients flow through.

    A number gives shape [1]. Python floats get the default dtype, an ndarray keeps its own.
    """
    return jnp.copy(promote(x)[0])


_assign = assign


def _assign_to(x: AnyTensor, output: AnyTensor | None = None) -> AnyTensor:
    if isinstance(x, (list, tuple)):
        refuse_sizes("assign", x)
        x = np.asarray(x)
        x = x.astype(dtypes.default_dtype()) if x.dtype == dtypes.float64 else x
    elif output is None and isinstance(x, (numbers.Number, np.generic)):
        return _assign(x).reshape([1])
    return _assign(x, out=output)


assign = republish(_assign, _assign_to)


@op(method=False, rule=elementwise_sum)
def clone(x: Array) -> Array:
    """A copy that gradients flow through."""
    return jnp.copy(x)


@op(method=False, rule=elementwise)
def complex(real: Array, imag: Array) -> Array:  # the public name
    """real + i imag, elementwise; float32 parts give complex64, float64 parts complex128."""
    real, imag = promote_floating(real, imag)
    return jax.lax.complex(*jnp.broadcast_arrays(real, imag))
