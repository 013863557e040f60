"""Buckets: feeds of any size padded up to one of a few, so that a Program is compiled once for each of those.

Padding must not be seen in a result. So a fetch has to grow with the padded dims, and when a bucket is used
first the part that is kept is compared with what the Program gives, run operation by operation, without padding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core.symbol import DYNAMIC
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, ProgramError
from polyreme.program.operation import depends
from polyreme.program.program import Program
from polyreme.program.run import make_run, replay, shapes_of
from polyreme.program.scope import Scope
from polyreme.program.training import Backward

Sizes = Mapping[str, Mapping[int, Sequence[int]]]
Shapes = Mapping[str, tuple[int, ...]]
_KNOWN = 256  # feed shapes whose fetch shapes are remembered


class Buckets:
    """Sizes that dims of feeds are padded up to: {name: {dim: sizes}}. Raises ConfigError for what is no such thing."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = {name: {dim: _check(name, dim, s) for dim, s in dims.items()} for name, dims in sizes.items()}

    def padded(self, program: Program, feed: Mapping[str, Any]) -> Shapes:
        """The shapes that feeds are padded to. Raises ProgramError for a name, dim or size that has no bucket."""
        for name, dims in self._sizes.items():
            variable = program.global_block().vars.get(name)
            for dim in dims:
                if variable is None or dim >= len(variable.shape) or variable.shape[dim] != DYNAMIC:
                    have = (
                        "the Program has no such variable"
                        if variable is None
                        else f"it has shape {list(variable.shape)}"
                    )
                    raise ProgramError(
                        f"buckets: dim {dim} of {name!r} is no size that may differ, {have}; declare it with None"
                    )
        return {n: self._shape(n, a.shape) for n, a in feed.items()}

    def _shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        result = list(shape)
        for dim, sizes in self._sizes.get(name, {}).items():
            fits = [s for s in sizes if s >= shape[dim]]
            if not fits:
                raise ProgramError(f"feed: {name!r} has {shape[dim]} in dim {dim}, its buckets end at {sizes[-1]}")
            result[dim] = fits[0]
        return tuple(result)

    @property
    def dims(self) -> dict[str, tuple[int, ...]]:
        """Name -> dims that are padded."""
        return {name: tuple(dims) for name, dims in self._sizes.items()}


def _check(name: str, dim: Any, sizes: Any) -> tuple[int, ...]:
    listed = tuple(sizes) if isinstance(sizes, (list, tuple)) else ()
    whole = all(type(n) is int for n in (dim, *listed))
    if not listed or not whole or dim < 0 or min(listed) < 1:
        raise ConfigError(
            f"buckets: got {{{name!r}: {{{dim!r}: {sizes!r}}}}}; give dims counted from 0 and for each a list of sizes "
            "of at least 1"
        )
    return tuple(sorted(set(listed)))


class BucketRun:
    """A Program compiled for feeds of certain padded shapes, in a scope; called with feeds as they are.

    bucketed: name -> dims that are padded. Raises ProgramError for a Program or fetch that padding would change.
    """

    def __init__(
        self,
        program: Program,
        scope: Scope,
        feed: Mapping[str, Any],
        padded: Shapes,
        names: Sequence[str],
        bucketed: Shapes,
        on_place: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._program, self._scope, self._names, self._padded = program, scope, list(names), padded
        self._known: OrderedDict[tuple, list[tuple[int, ...]]] = OrderedDict()
        self._compared = False
        if any(isinstance(op, Backward) for op in program.every_op()):
            raise ProgramError(
                "buckets: the Program has a backward, and rows of padding would count in its loss; train without "
                "buckets, and use them for a clone(for_test=True)"
            )
        self._run = make_run(program, scope, _fill(feed, padded), names, on_place)
        if self._run.changes:
            raise ProgramError(
                "buckets: the Program changes persistable values or draws random numbers, which padding would change; "
                "use a clone(for_test=True)"
            )
        grown = {n: tuple(2 * s if d in bucketed.get(n, ()) else s for d, s in enumerate(padded[n])) for n in padded}
        self._whole = self._shapes(feed, padded)
        reached = depends(program.global_block().ops, {n for n in bucketed if n in padded})
        self._cut = [name in reached for name in names]
        for name, cut, shape, other in zip(names, self._cut, self._whole, self._shapes(feed, grown), strict=True):
            if cut and shape == other:
                raise ProgramError(
                    f"buckets: fetch {name!r} of shape {list(shape)} depends on the padded {sorted(bucketed)}, but its "
                    "size does not, so that padding would count in its value; fetch what it is computed from"
                )

    def serves(self, given: Mapping[str, Any]) -> bool:
        """Whether the scope still looks as it did."""
        return self._run.serves(given)

    def __call__(self, feed: Mapping[str, Any]) -> list[Any]:
        outs = self._run(_fill(feed, self._padded))
        if all(tuple(a.shape) == self._padded[n] for n, a in feed.items()):
            return outs
        shapes = self._shapes(feed, {n: tuple(a.shape) for n, a in feed.items()})
        outs = [
            out[tuple(slice(0, s) for s in shape)] if cut else out
            for out, shape, cut in zip(outs, shapes, self._cut, strict=True)
        ]
        if not self._compared:
            self._compare(feed, outs)
            self._compared = True
        return outs

    def _compare(self, given: Mapping[str, Any], outs: list[Any]) -> None:
        feeds = {n: Tensor(np.asarray(a)) for n, a in given.items()}
        for name, out, exact in zip(
            self._names, outs, replay(self._program, self._scope, feeds, self._names), strict=True
        ):
            if not _agree(np.asarray(out), np.asarray(exact._array)):
                raise ProgramError(
                    f"buckets: fetch {name!r} has another value when the feeds are padded with zeros; mask the padding "
                    "in the Program, or leave the dim out of buckets"
                )

    def _shapes(self, given: Mapping[str, Any], shapes: Shapes) -> list[tuple[int, ...]]:
        """Shapes of the fetches for feeds of these shapes."""
        key = tuple(shapes.items())
        if key not in self._known:
            feeds = {n: jax.ShapeDtypeStruct(s, given[n].dtype) for n, s in shapes.items()}
            self._known[key] = shapes_of(self._program, self._scope, feeds, self._names)
            while len(self._known) > _KNOWN:
                self._known.popitem(last=False)
        return self._known[key]


def _agree(out: np.ndarray, exact: np.ndarray) -> bool:
    if not dtypes.is_inexact(exact.dtype):
        return np.array_equal(out, exact)
    # sums of n terms in another order are apart by n * eps of their size at most; 1 / sqrt(eps) terms are many
    tolerance = float(jnp.finfo(exact.dtype).eps) ** 0.5 * np.max(np.abs(exact[np.isfinite(exact)]), initial=0)
    return np.allclose(out.astype(exact.dtype), exact, rtol=0, atol=tolerance, equal_nan=True)


def _fill(given: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """The feeds, padded with zeros to these shapes."""
    return {n: _pad(np.asarray(a), shapes[n]) if tuple(a.shape) != shapes[n] else a for n, a in given.items()}


def _pad(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    padded = np.zeros(shape, array.dtype)
    padded[tuple(slice(0, s) for s in array.shape)] = array
    return padded
