"""One Layer run many times, with other weights each time, as one loop: its Python is traced once, and compiled once.

Runs inside a capture only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from polyreme.core import dtype as dtypes
from polyreme.core import rng, state
from polyreme.core.kernel import Kernel
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ShapeError
from polyreme.jit.region import Inputs, Out, Region, evaluate, separating, trace


def scan_layer(
    layer: Callable[..., Any], weights: Sequence[Any], xs: Sequence[Any], constants: dict[str, Any]
) -> list[Any]:
    """xs after layer(*xs, **constants) for each entry of weights' first dim, in order; -> Tensors as xs.

    weights: Parameters of the layer, stacked; while the layer runs each of them is its own entry. The layer returns as
    many Tensors as it takes, of their shapes and dtypes: ShapeError else. It may draw random numbers, and writes no
    other Tensor: CaptureError.
    """
    return separating(lambda: _scan(layer, weights, xs, constants))


def _scan(layer: Callable[..., Any], weights: Sequence[Any], xs: Sequence[Any], constants: dict[str, Any]) -> list:
    key = rng.default_generator.key_state()
    carried = [*xs, key]
    region = _trace(layer, weights, xs, constants, key)
    inputs = Inputs([region])
    consts = inputs.consts(region)
    arrays = [*carried, *weights]
    first, count = len(inputs.arrays), len(carried)
    draws = isinstance(region.values[1][1][0], Out)

    def fn(*arrays: Any) -> tuple:
        closed = [arrays[c] for c in consts]

        def step(carry: tuple, entries: tuple) -> tuple:
            outs = evaluate(region, closed, *carry, *entries)
            return (*outs, *(() if draws else carry[-1:])), None

        return jax.lax.scan(step, arrays[first : first + count], arrays[first + count :])[0]

    kernel = Kernel(fn, "scanned_layer", saves=True)
    results = tape.apply(
        kernel,
        (*inputs.arrays, *map(state.read, arrays)),
        (*inputs.edges, *(tape.edge_of(t) for t in xs), None, *map(tape.edge_of, weights)),
    )
    if draws:
        state.write(key, results[-1]._array)
    return list(results[:-1])


def _trace(
    layer: Callable[..., Any], weights: Sequence[Any], xs: Sequence[Any], constants: dict[str, Any], key: Any
) -> Region:
    """One run, of xs, the random key and one entry of each weight."""
    avals = [jax.ShapeDtypeStruct(t.shape, state.read(t).dtype) for t in xs]
    key_array = state.read(key)
    avals.append(jax.ShapeDtypeStruct(key_array.shape, key_array.dtype))
    avals += [jax.ShapeDtypeStruct(w.shape[1:], state.read(w).dtype) for w in weights]

    def call(*arrays: Any) -> list[Any]:
        swapped = [key, *weights]
        for tensor in swapped:
            state.read(tensor)
        # not what reading gives: it cuts frozen ones off
        before = [(tensor, tensor._array) for tensor in swapped]
        layouts = [w.layouts for w in weights]
        for tensor, array in zip(swapped, arrays[len(xs) :], strict=True):
            tensor._array = array
        for weight in weights:
            weight.layouts = _entry_layouts(weight.layouts)
        try:
            ins = [Tensor(a, stop_gradient=not dtypes.is_inexact(a.dtype)) for a in arrays[: len(xs)]]
            result = layer(*ins, **constants)
            if any(w._array is not a for w, a in zip(weights, arrays[len(xs) + 1 :], strict=True)):
                raise CaptureError(_WRITES)
            outs = list(result) if isinstance(result, (tuple, list)) else [result]
            return [outs, None if key._array is arrays[len(xs)] else Tensor(key._array)]
        finally:
            for tensor, array in before:
                tensor._array = array
            for weight, places in zip(weights, layouts, strict=True):
                weight.layouts = places

    region = trace(call, avals)
    if region.written:
        raise CaptureError(_WRITES)
    _check(region, avals[: len(xs)])
    return region


def _entry_layouts(layouts: dict[str, Any]) -> dict[str, Any]:
    """The layout in which an op reads one entry of a stacked parameter, given the layout of the stack."""
    use = layouts.get("use")
    return {} if use is None else {"use": NamedSharding(use.mesh, PartitionSpec(*use.spec[1:]))}


def _check(region: Region, avals: Sequence[Any]) -> None:
    outs = region.values[0][1]
    given = [f"{list(o.shape)} {o.dtype.name}" if isinstance(o, Out) else repr(o) for o in outs]
    wanted = [f"{list(a.shape)} {a.dtype.name}" for a in avals]
    if given != wanted:
        raise ShapeError(
            f"a stacked layer gives {', '.join(given)} for {', '.join(wanted)}; it must return what it takes, as the "
            "next one is run on that"
        )


_WRITES = (
    "a stacked layer writes a Tensor when it is called, such as running statistics: all layers of the stack share its "
    "code, and only parameters are of each; use a LayerList"
)
