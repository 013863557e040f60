"""Shapes and dtypes of what operations give, found by running them on abstract Tensors.

Where a size is not known the run is made twice, with two sizes in its place: what differs is not known. An operation
that needs values (unique, a size that is fed) runs on samples of them instead; a size that differs between samples
depends on values, and is not known either.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import rng, state
from polyreme.core.state import TensorState, Tracer
from polyreme.core.symbol import DYNAMIC, PROBES, Symbol
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ConfigError, DTypeError, GradError, HostValueError, ProgramError, ShapeError
from polyreme.jit.capture import Capture, watching
from polyreme.program import values
from polyreme.program.operation import Call, call, is_folded
from polyreme.program.scope import Scope

_MOST_FITTED = 128  # ways of giving dynamic dims a size, each a trace
_SMALL = (2, 3, 4, 1)  # numbers of coordinates and of parts; 1 for what is there once
_STAND_INS = "|".join(rf"\b{probe}\b" for probe in PROBES)
_OURS = (ShapeError, DTypeError, ConfigError, CaptureError, GradError, IndexError, TypeError, ValueError)


@dataclass
class InferredTensor:
    """A Tensor that an operation gave while shapes were inferred."""

    array: Any
    stop_gradient: bool

    @classmethod
    def of(cls, tensor: TensorState) -> InferredTensor:
        """What there is to know of a Tensor."""
        return cls(tensor._array, tensor.stop_gradient)


def call_results(recorded: Call, by_name: dict[str, TensorState]) -> tuple[list[Any], list[str]]:
    """(what the call gives for each probe size, persistable values it changes)."""
    changed: list[str] = []

    def run(given: dict[str, Tensor]) -> Any:
        args, kwargs = values.resolve((recorded.args, recorded.kwargs), given.__getitem__)
        result = call(recorded.name, args, kwargs)
        changed[:] = [n for n, t in given.items() if t._array is not starts[n]]
        return values.replace(result, TensorState, InferredTensor.of)

    starts: dict[str, Any] = {}
    with tape.GradEnabled(recorded.taped):
        try:
            return probed(by_name, run, starts), changed
        except ShapeError as error:
            results = _fitted(recorded, by_name, run, starts, error)
            if results is None:
                raise
            return results, changed


def probed(
    by_name: dict[str, TensorState],
    run: Callable[[dict[str, Tensor]], Any],
    starts: dict[str, Any],
    sampled: bool = True,
    declared: Callable[[], list[Any] | None] | None = None,
) -> list[Any]:
    """run's result on abstract Tensors, for each probe size if a size or value depends on it; on samples of values if
    it needs them, else what is declared. sampled: False for what may never end on values of our choice.
    """
    symbols = [t._array for t in by_name.values() if isinstance(t._array, Symbol)]
    probes = PROBES if any(s.is_dynamic or s.known is not None for s in symbols) else PROBES[:1]
    try:
        return [_abstractly(by_name, run, starts, probe) for probe in probes]
    except HostValueError as error:
        results = _on_samples(by_name, run, starts) if sampled else None
        if results is None and declared is not None:
            results = declared()
        if results is not None:
            return results
        what = str(error).partition(" needs the value on the host")[0]
        raise CaptureError(
            f"{what} needs the value, and a static Program has none while it is recorded; use an op whose result has a "
            "shape that does not depend on values (where, masked_fill), or compute it outside and feed it"
        ) from error


def _named_sizes(error: Exception) -> set[int]:
    """The sizes that an error's text names, which are those that an op needs: "needs [N, 2, 3]"."""
    return {int(n) for n in re.findall(r"(?<![\w.-])\d{1,9}\b", str(error))} - {*PROBES}


def _named_shapes(error: Exception) -> list[tuple[int, ...]]:
    """The shapes without open sizes that an error's text names."""
    shapes = re.findall(r"\[(\d{1,9}(?:, \d{1,9})*)\]", str(error))
    return [tuple(map(int, shape.split(", "))) for shape in shapes]


def _fitted(
    recorded: Call, by_name: dict[str, TensorState], run: Callable, starts: dict[str, Any], refused: ShapeError
) -> list[Any] | None:
    """run's results where a dynamic dim, two, or all of an input have sizes that the call meets elsewhere, open ones
    included, or that the refusal names, or small ones that an op asks for, as grid_sample does 2 coordinates; None if
    that fails too.

    What an op refuses for any other size, such as x * w of x [-1] and w [5], leaves no other size open.
    """
    symbols = {n: t._array for n, t in by_name.items() if isinstance(t._array, Symbol) and t._array.known is None}
    dims = [(name, dim) for name, symbol in symbols.items() for dim, d in enumerate(symbol.shape) if d == DYNAMIC]
    met = {int(d) for t in by_name.values() for d in t._array.shape}
    for listed in (*recorded.args, *recorded.kwargs.values()):
        if isinstance(listed, (list, tuple)) and listed and all(type(d) is int for d in listed):
            met |= {*listed, math.prod(listed), sum(listed), len(listed)}
    sizes = sorted(d for d in met if d > 1 and d not in PROBES)
    pairs = list(itertools.product(dims, sizes))
    shapes = [t._array.shape for t in by_name.values()]
    # dims of size 1 broadcast against any other size; expand_as alone needs them to be 1
    alike = [
        way
        for left_out in ((DYNAMIC, 1), (DYNAMIC,))
        for (n, s), other in itertools.product(symbols.items(), shapes)
        if (way := _as_other(n, s.shape, other, left_out))
    ]
    needed = [
        way
        for (n, s), shape in itertools.product(symbols.items(), _named_shapes(refused))
        if len(shape) == len(s.shape) and (way := _as_other(n, s.shape, shape, (DYNAMIC,)))
    ]
    needed += [[way] for way in itertools.product(dims, sorted(_named_sizes(refused)))]
    # open sizes that the code computed in different ways, such as those of a map and of the targets fed for it
    met_open = [
        way for (n, s), (m, t) in itertools.permutations(symbols.items(), 2) if n != m and (way := _as_open(n, s, t))
    ]
    # two dims of one input first, such as those of a mask [-1, 1, -1, -1] whose other sizes stand in queries and keys
    both = sorted(itertools.combinations(pairs, 2), key=lambda two: two[0][0][0] != two[1][0][0])
    small = [(at, size) for at in dims for size in _SMALL if size not in sizes]
    in_each = [
        [((name, dim), size) for name, symbol in symbols.items() if symbol.shape[dim : dim + 1] == (DYNAMIC,)]
        for dim in range(max((len(s.shape) for s in symbols.values()), default=0))
        for size in _SMALL
    ]

    def taken(ways: Iterable[Any]) -> Iterator[list[Any]]:
        """What the call gives for each of the PROBES under the ways that it takes."""
        for chosen in itertools.islice(filter(None, ways), _MOST_FITTED):
            try:
                yield [_abstractly(by_name, run, starts, probe, dict(chosen)) for probe in PROBES]
            except (*_OURS, HostValueError):
                continue

    def first(ways: Iterable[Any]) -> list[Any] | None:
        return next(taken(ways), None)

    def agreed(ways: Iterable[Any]) -> list[Any] | None:
        return _merged_ways(list(taken(ways)))

    return (
        first((p,) for p in pairs)
        or agreed((p,) for p in small)
        or first(itertools.chain(needed, alike, met_open, _of_two_dims(both)))
        or agreed(in_each)
        or agreed(_of_two_dims(itertools.combinations(small, 2)))
    )


def _merged_ways(taken: list[list[Any]]) -> list[Any] | None:
    """The first way's results and the last one's, so that sizes which differ with the way are dynamic; None if there is
    no way, or if numbers of dims differ with it."""
    if not taken:
        return None
    pair = [taken[0][0], taken[-1][1]]
    ndims = [[leaf.array.ndim for leaf in values.leaves(result, InferredTensor)] for result in pair]
    return pair if ndims[0] == ndims[1] else None


def _of_two_dims(ways: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    return (two for two in ways if two[0][0] != two[1][0])


def _as_other(
    name: str, shape: tuple[int, ...], other: tuple[int, ...], left_out: tuple[int, ...]
) -> list[tuple[tuple[str, int], int]]:
    """The dynamic dims of shape with the sizes that another has there, as broadcasting aligns them, but for some."""
    aligned = zip(range(len(shape) - 1, -1, -1), reversed(other), strict=False)
    return [((name, dim), int(size)) for dim, size in aligned if shape[dim] == DYNAMIC and size not in left_out]


def _as_open(name: str, symbol: Symbol, other: Symbol) -> list[tuple[tuple[str, int], tuple[int, ...]]]:
    """The dynamic dims of symbol with the sizes that another of as many dims has there under each of the PROBES."""
    if len(symbol.shape) != len(other.shape):
        return []
    mine, theirs = ([tuple(s.at(probe).shape) for probe in PROBES] for s in (symbol, other))
    return [
        ((name, dim), tuple(sizes[dim] for sizes in theirs))
        for dim, (a, b) in enumerate(zip(symbol.shape, other.shape, strict=True))
        if a == DYNAMIC and b != 1 and any(m[dim] != t[dim] for m, t in zip(mine, theirs, strict=True))
    ]


def _abstractly(
    by_name: dict[str, TensorState],
    run: Callable,
    starts: dict[str, Any],
    probe: int,
    fixed: dict[tuple[str, int], int | tuple[int, ...]] | None = None,
) -> Any:
    avals = {n: t._array.at(probe) if isinstance(t._array, Symbol) else _abstract(t._array) for n, t in by_name.items()}
    for (name, dim), size in (fixed or {}).items():
        shape = avals[name].shape
        one = size[PROBES.index(probe)] if isinstance(size, tuple) else size
        avals[name] = avals[name].update(shape=(*shape[:dim], one, *shape[dim + 1 :]))
    free = {n: a for n, a in avals.items() if isinstance(a, jax.ShapeDtypeStruct)}
    results: list[Any] = []

    def stage(arrays: dict[str, Any]) -> None:
        with watching(Capture()):
            starts.update({n: arrays.get(n, a) for n, a in avals.items()})
            given = {n: _like(by_name[n], array) for n, array in starts.items()}
            results.append(run(given))

    try:
        jax.eval_shape(stage, free)
    except HostValueError:
        raise
    except _OURS as error:
        shown = re.sub(_STAND_INS, "-1", str(error))
        if shown == str(error):
            raise
        raise type(error)(shown) from error
    return results[0]


_SAMPLES: tuple[tuple[int, Callable[[np.ndarray], Any]], ...] = (
    (0, np.ones_like),
    (1, lambda i: 2 + i % 5),
    (0, lambda i: 3 - i % 3),
    (0, lambda i: i % 2),
    (0, np.zeros_like),
)
"""Which of the PROBES stands for a dynamic dim, and the values of elements by their number in row-major order."""
_MOST_SAMPLED = 2**24  # elements of one input
_MOST_SAMPLES = 8  # ways of giving a dynamic dim a size, each a run on all samples


def _on_samples(by_name: dict[str, TensorState], run: Callable, starts: dict[str, Any]) -> list[Any] | None:
    """run's results for the two PROBES, of what it gives on samples of values, with a size that it needs for a dynamic
    dim, as nms does 4 coordinates; None if it fails on all of them."""
    sizes: tuple[int, ...] = _SMALL
    try:
        results = _sampled(by_name, run, starts)
    except ShapeError as error:
        results, sizes = None, (*sorted(_named_sizes(error)), *_SMALL)
    if results is not None:
        return results
    symbols = {n: t._array for n, t in by_name.items() if isinstance(t._array, Symbol)}
    dims = [(n, dim) for n, symbol in symbols.items() for dim, d in enumerate(symbol.shape) if dim and d == DYNAMIC]
    for way in itertools.islice(itertools.product(dims, sizes), _MOST_SAMPLES):
        with contextlib.suppress(ShapeError):
            results = _sampled(by_name, run, starts, dict([way]))
        if results is not None:
            return results
    return None


def _sampled(
    by_name: dict[str, TensorState],
    run: Callable,
    starts: dict[str, Any],
    fixed: dict[tuple[str, int], int] | None = None,
) -> list[Any] | None:
    """run's results on samples; None if it takes none of the values, or they are too large.

    Raises ShapeError if it takes no such shapes.
    """
    seen: list[tuple[int, Any]] = []
    unfit: ShapeError | None = None
    outer, state.watch.active = state.watch.active, None
    try:
        for probe, elements in _SAMPLES:
            avals = {n: _sized(t._array, n, PROBES[probe], fixed or {}) for n, t in by_name.items()}
            arrays = {n: _sample(aval, elements) for n, aval in avals.items()}
            if any(a is None for a in arrays.values()):
                return None
            starts.update(arrays)
            try:
                with rng.default_generator.drawing_from(rng.Generator().manual_seed(0)):
                    seen.append((probe, run({n: _like(by_name[n], a) for n, a in arrays.items()})))
            except ShapeError as error:
                unfit = error
            except (*_OURS, RuntimeError):  # these values are none that it takes
                continue
    finally:
        state.watch.active = outer
    try:
        if not seen and unfit is not None:
            raise unfit
        return _merged(seen) if seen else None
    finally:
        del unfit  # this frame is in its traceback: a cycle that keeps what its callers have


def _sized(array: Any, name: str, probe: int, fixed: dict[tuple[str, int], int]) -> Any:
    """An input's array, or the abstract one under a probe, with the sizes that are fixed."""
    like = array.at(probe) if isinstance(array, Symbol) else array
    if not isinstance(like, jax.ShapeDtypeStruct):
        return like
    return like.update(shape=tuple(fixed.get((name, dim), size) for dim, size in enumerate(like.shape)))


def _sample(like: Any, elements: Callable[[np.ndarray], Any]) -> Any:
    """A value for an input; the known one if there is one, None for one that would be too large."""
    if not isinstance(like, jax.ShapeDtypeStruct):
        return like
    count = math.prod(like.shape)
    return jnp.asarray(elements(np.arange(count)).reshape(like.shape), like.dtype) if count <= _MOST_SAMPLED else None


def _merged(seen: list[tuple[int, Any]]) -> list[Any] | None:
    """A result with the sizes under each of the PROBES, where they follow from sizes, else those PROBES themselves."""
    leaves = [list(values.leaves(result, InferredTensor)) for _, result in seen]
    first = [found for (probe, _), found in zip(seen, leaves, strict=True) if probe == 0]
    other = [found for (probe, _), found in zip(seen, leaves, strict=True) if probe == 1]
    if len({tuple((leaf.array.ndim, leaf.array.dtype) for leaf in found) for found in leaves}) != 1:
        return None

    def sizes(index: int, probe: int) -> tuple[int, ...]:
        shapes = [found[index].array.shape for found in first]
        last = other[0][index].array.shape if other else None
        by_size = [len(shapes) > 1 and len({s[d] for s in shapes}) == 1 for d in range(len((shapes or [last])[0]))]
        own = (shapes[0] if probe == 0 else last or shapes[0]) if shapes else ()
        return tuple(own[d] if fixed else PROBES[probe] for d, fixed in enumerate(by_size))

    def with_sizes(probe: int) -> Any:
        index = itertools.count()
        return values.replace(
            seen[0][1],
            InferredTensor,
            lambda leaf: InferredTensor(
                jax.ShapeDtypeStruct(sizes(next(index), probe), leaf.array.dtype), leaf.stop_gradient
            ),
        )

    return [with_sizes(0), with_sizes(1)]


def _abstract(array: Any) -> Any:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=getattr(array, "weak_type", False))


def _like(tensor: TensorState, array: Any) -> Tensor:
    if not isinstance(array, (jax.Array, Tracer)):
        array = np.asarray(array)
    made = Tensor.__new__(Tensor)
    TensorState.__init__(made, array, tensor.stop_gradient)
    return made


def shape_of(first: Any, other: Any) -> tuple[int, ...]:
    """The shape of a result from what it was under each probe."""
    if len(first.shape) != len(other.shape):
        raise ProgramError(
            f"a result has {len(first.shape)} or {len(other.shape)} dims, depending on a size that is not known while "
            "recording; give that size in static.data"
        )
    return tuple(a if a == b else DYNAMIC for a, b in zip(first.shape, other.shape, strict=True))


def known_of(first: Any, other: Any) -> tuple[Any, Any] | None:
    """The values of a result under each probe, where they follow from shapes."""
    if is_folded(first) and is_folded(other):
        return np.asarray(first), np.asarray(other)
    return None


def scope_of(given: dict[str, Tensor]) -> Scope:
    """A scope that holds these Tensors, for operations that look persistable values up."""
    scope = Scope()
    for name, tensor in given.items():
        scope.adopt(name, tensor)
    return scope
