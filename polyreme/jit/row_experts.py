"""Experts that are any functions of rows, called on the rows that chose them, in one kernel.

They are traced on one block of rows each. If they compute the same with other arrays, these are stacked, and a loop
over blocks picks the arrays of each block's expert: kernels.grouped_apply. Runs inside a capture only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from polyreme import kernels
from polyreme.core import layout, state
from polyreme.core.kernel import Kernel
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ShapeError
from polyreme.jit.capture import capture_in_progress
from polyreme.jit.region import Inputs, Out, Region, evaluate, separating, trace
from polyreme.ops.experts.exchange import exchange

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def call_experts(
    experts: Sequence[Callable[[Any], Any]], weights: Sequence[Sequence[Any]], x: Any, choices: Any, gates: Any
) -> Any:
    """sum over j of gates[..., j] * experts[choices[..., j]](x): [..., d], twice [..., k] -> [..., d].

    Each expert maps rows [n, d] to [n, d], every row by itself; weights: the Tensors that each one is made of, in one
    order. None if they cannot be stacked: they compute different things, or draw random numbers. Raises CaptureError
    for experts that write Tensors, ShapeError for another result.
    """
    if len({tuple((tuple(w.shape), w.dtype) for w in each) for each in weights}) > 1:
        return None
    rows = x.size // x.shape[-1] * choices.shape[-1]
    block = kernels.block_size(rows, len(experts))
    return separating(lambda: _call(experts, weights, x, choices, gates, block))


def _call(
    experts: Sequence[Callable[[Any], Any]], weights: Sequence[Sequence[Any]], x: Any, choices: Any, gates: Any,
    block: int,
) -> Any:  # fmt: skip
    aval = jax.ShapeDtypeStruct((block, x.shape[-1]), x.dtype)
    regions = [_trace(expert, own, aval) for expert, own in zip(experts, weights, strict=True)]
    if any(region.written for region in regions) or len({_text(region) for region in regions}) > 1:
        return None
    inputs = Inputs(regions)
    columns = [list(column) for column in zip(*map(inputs.consts, regions), strict=True)]
    stacks = [_stack_of(column) for column in zip(*weights, strict=True)]
    for stack, column in zip(stacks, zip(*weights, strict=True), strict=True):
        columns.append([inputs.add(state.read(w), tape.edge_of(w)) for w in (column if stack is None else [stack])])
    is_stack = [False] * (len(columns) - len(stacks)) + [stack is not None for stack in stacks]
    differ = [whole or len(set(column)) > 1 for whole, column in zip(is_stack, columns, strict=True)]
    count, first = len(inputs.arrays), regions[0]
    consts = len(columns) - len(weights[0])
    over = exchange(x.shape, (len(experts), x.shape[-1], 1), choices.shape[-1])

    def run(rows: Any, *arrays: Any) -> Any:
        stacked, shared = iter(arrays[: sum(differ)]), iter(arrays[sum(differ) :])
        parts = [next(stacked) if d else next(shared) for d in differ]
        return evaluate(first, parts[:consts], rows, *parts[consts:])[0]

    def ffn(rows: Any, sizes: Any, weights: Any) -> Any:
        stacked = [w for w, d in zip(weights, differ, strict=True) if d]
        shared = [w for w, d in zip(weights, differ, strict=True) if not d]
        return kernels.grouped_apply(run, rows, sizes, stacked, shared, block)

    def fn(*arrays: Any) -> Any:
        parts = [
            jnp.stack([arrays[i] for i in column]) if d and not whole else arrays[column[0]]
            for column, d, whole in zip(columns, differ, is_stack, strict=True)
        ]
        rows, chosen, weighs = arrays[count:]
        if over is None:
            return kernels.row_experts(rows, chosen, weighs, parts, len(experts), ffn)
        return over.compute_rows(rows, chosen, weighs, parts, differ, len(experts), ffn)

    tokens = (x, choices, gates)
    arrays = (*inputs.arrays, *map(state.read, tokens))
    edges = (*inputs.edges, *map(tape.edge_of, tokens))
    return tape.apply(Kernel(fn, "row_experts", saves=True), arrays, edges)


def _trace(expert: Callable[[Any], Any], weights: Sequence[Any], aval: Any) -> Region:
    """One call on a block of rows. Its weights are arguments, as those of all experts will take their place, on the
    devices of each."""
    watcher = capture_in_progress()
    converted = expert if watcher is None else watcher.converted(expert)
    avals = [aval, *(jax.ShapeDtypeStruct(tuple(w.shape), w.dtype) for w in weights)]

    def call(rows: Any, *arrays: Any) -> list[Any]:
        for weight in weights:
            state.touch(weight)
        # not what reading gives: it cuts frozen ones off
        before = [weight.lend(array) for weight, array in zip(weights, arrays, strict=True)]
        try:
            out = [converted(Tensor(rows, stop_gradient=False))]
            if any(w._array is not a for w, a in zip(weights, arrays, strict=True)):
                raise CaptureError(_WRITES)
            return out
        finally:
            for weight, array in zip(weights, before, strict=True):
                weight.lend(array)

    placed, layout.active.layout = layout.active.layout, None  # a block of rows lies on one device
    try:
        region = trace(call, avals)
    finally:
        layout.active.layout = placed
    if any(isinstance(ended.tensor, Tensor) for ended in region.written.values()):
        raise CaptureError(_WRITES)
    _, leaves = region.values[0]
    if len(leaves) != 1 or not isinstance(leaves[0], Out) or leaves[0].shape != aval.shape:
        got = list(leaves[0].shape) if len(leaves) == 1 and isinstance(leaves[0], Out) else "no Tensor"
        raise ShapeError(f"an expert gives {got} for tokens {list(aval.shape)}; it must give a Tensor of their shape")
    return region


def _stack_of(column: Sequence[Any]) -> Any:
    """The Tensor that a weight of each expert, in their order, is an entry of; None where there is none."""
    holder = column[0].holder
    if any(w.holder is w or w.holder is not holder for w in column) or holder.shape[0] != len(column):
        return None
    return holder if [w.at for w in column] == list(range(len(column))) else None


_WRITES = (
    "an expert writes a Tensor when it is called, such as statistics of a batch: what it gives a token would depend on "
    "the others that chose it; give experts that treat every token by itself"
)


def _text(region: Region) -> str:
    return _ADDRESS.sub("", str(region.closed.jaxpr))
