"""Sharding constraints on activations, set by hooks at the layers of a model that sets none itself.

The partitioner derives most placements from those of the parameters. A constraint pays for the output of weights that
are split by columns, for the residual stream between blocks, and for tokens looked up in a split table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from polyreme.distributed.auto_parallel.dims.blocks import repeated_blocks
from polyreme.distributed.auto_parallel.dims.factors import Factor, leaves
from polyreme.distributed.auto_parallel.dims.infer import Inferred, Names
from polyreme.distributed.auto_parallel.dims.roles import Use, is_split_by_mp
from polyreme.distributed.auto_parallel.dims.trace import LayerCall, TracedOp, TracedValue
from polyreme.eager.tensor import HookHandle, Tensor
from polyreme.nn.layer import Layer
from polyreme.ops.layout import constrain


@dataclass(frozen=True, slots=True)
class DimConstraint:
    """The dims of a layer's output, or of its first input; path: the layer's dotted name. Constraints are applied one
    after another: a value that is summed over devices is made whole first, then split."""

    path: str
    side: str
    dims: tuple[Names, ...]


def constraints(inferred: Inferred) -> list[DimConstraint]:
    """The constraints that are worth setting. A layer whose calls need different dims gets none."""
    found: dict[tuple[str, str], set[tuple[Names, ...]]] = {}
    for path, at, dims in _constraints(inferred):
        if any(name is not None for names in dims for name in names):
            found.setdefault((path, at), set()).add(dims)
    return [DimConstraint(path, at, ways.pop()) for (path, at), ways in found.items() if len(ways) == 1]


def constrain_layers(model: Layer, wanted: Sequence[DimConstraint]) -> list[HookHandle]:
    """Set constraints by hooks on the model's layers; they do nothing while no plan is in force. remove() of a handle
    takes one away.

    A value that has another number of dims than was traced is left alone.
    """
    layers = dict(model.named_sublayers(include_self=True))
    handles = []
    for each in wanted:
        if each.side == "output":
            handles.append(layers[each.path].register_forward_post_hook(_Output(each.dims)))
        else:
            handles.append(layers[each.path].register_forward_pre_hook(_InputHook(each.dims)))
    return handles


def _constraints(inferred: Inferred) -> Iterator[tuple[str, str, tuple[Names, ...]]]:
    """(layer's path, "input" or "output", dims) of everything worth saying."""
    traced = inferred.traced
    for run in repeated_blocks(traced):
        for call in run.calls:
            if len(call.outputs) == 1 and _is_stream(inferred, call.outputs[0]):
                yield call.path, "output", (inferred.dims_of(call.outputs[0]),)
    tables = {lookup.where for lookup in inferred.facts.lookups if _name(inferred, leaves(lookup.rows)) == "vocab"}
    products: dict[int, list[Use]] = {}
    for use in inferred.roles.uses:
        products.setdefault(use.product.where, []).append(use)
    for call in traced.calls:
        ends = {id(value) for value in call.outputs}
        for index in range(call.first, call.last):
            op = traced.ops[index]
            if len(call.outputs) != 1 or id(op.outputs[0]) not in ends or traced.calls[op.call] is not call:
                continue
            if index in tables:
                yield call.path, "output", _summed_then_cut(inferred, op.outputs[0])
            for use in products.get(index, []):
                yield from _around(inferred, call, use, op)


def _around(
    inferred: Inferred, call: LayerCall, use: Use, op: TracedOp
) -> Iterator[tuple[str, str, tuple[Names, ...]]]:
    """The constraint of a layer that holds one weight: on its output if the weight is split by columns in whole parts,
    on its input if it is split by rows."""
    roles = inferred.roles
    output = op.outputs[0]
    last = inferred.values[output].dims[-1:]
    if any(is_split_by_mp(roles.names.get(leaf)) for leaf in use.columns) and all(map(roles.is_outermost, last)):
        yield call.path, "output", (inferred.dims_of(output),)
    split = [leaf for leaf in use.rows if is_split_by_mp(roles.names.get(leaf))]
    if split and use.rows[0] is split[0] and len(call.inputs) == 1 and call.inputs[0] in op.inputs:
        yield call.path, "input", (inferred.dims_of(call.inputs[0]),)


def _summed_then_cut(inferred: Inferred, value: TracedValue) -> tuple[Names, ...]:
    """Rows of a split table are summed over devices: whole in seq first, for asked for a part at once the partitioner
    gathers the table instead."""
    dims = inferred.dims_of(value)
    whole = tuple("block_seq" if name == "seq" else name for name in dims)
    return (dims,) if whole == dims else (whole, dims)


def _is_stream(inferred: Inferred, value: TracedValue) -> bool:
    dims = inferred.dims_of(value)
    return "batch" in dims and dims[-1:] == ("embed",)


def _name(inferred: Inferred, factors: Sequence[Factor]) -> str | None:
    return next((inferred.roles.names[f] for f in factors if f in inferred.roles.names), None)


class _Output:
    """A hook: a layer's output with its dims named."""

    def __init__(self, dims: tuple[Names, ...]) -> None:
        self.dims = dims

    def __call__(self, layer: Any, inputs: Any, outputs: Any) -> Any:
        return _said(outputs, self.dims)


class _InputHook:
    """A hook: a layer's first input with its dims named."""

    def __init__(self, dims: tuple[Names, ...]) -> None:
        self.dims = dims

    def __call__(self, layer: Any, inputs: Any) -> Any:
        return (_said(inputs[0], self.dims), *inputs[1:]) if inputs else inputs


def _said(value: Any, dims: tuple[Names, ...]) -> Any:
    if not isinstance(value, Tensor) or len(value._array.shape) != len(dims[0]):
        return value
    for names in dims:
        value = constrain(value, *names)
    return value
