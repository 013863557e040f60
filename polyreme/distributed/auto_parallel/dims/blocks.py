"""Blocks of a traced model: runs of layers that do the same thing on values of the same shapes, one after another.

What recompute, pipelines and the planner cut a model by.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from polyreme.distributed.auto_parallel.dims.trace import LayerCall, Traced


@dataclass(frozen=True, slots=True)
class Repeated:
    """Calls of layers, one after another, that are equal in ops, shapes and parameters."""

    calls: tuple[LayerCall, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """Dotted names of the layers."""
        return tuple(call.path for call in self.calls)


def repeated_blocks(traced: Traced) -> list[Repeated]:
    """The runs of equal blocks of a model, in the order data flows: the outermost that there are.

    Blocks that follow each other and are equal make one run. A layer that stands alone among runs of its siblings is a
    run of one.

    >>> import numpy as np
    >>> from polyreme.distributed.auto_parallel.dims.trace import trace
    >>> from polyreme.nn import Linear, ReLU, Sequential
    >>> net = Sequential(Linear(3, 4), *[Sequential(Linear(4, 4), ReLU()) for _ in range(3)], Linear(4, 2))
    >>> [run.paths for run in repeated_blocks(trace(net, [np.zeros((1, 3), "float32")]))]
    [('1', '2', '3')]
    """
    children: dict[int, list[int]] = {}
    for at, call in enumerate(traced.calls):
        children.setdefault(call.outer, []).append(at)
    found = list(_runs(traced, children, -1))
    return sorted(found, key=lambda run: run.calls[0].first)


def _runs(traced: Traced, children: dict[int, list[int]], outer: int) -> Iterator[Repeated]:
    """Runs among the calls made directly inside one, else inside each of those."""
    calls = [traced.calls[index] for index in children.get(outer, [])]
    families: dict[Hashable, list[LayerCall]] = {}
    for call in calls:
        families.setdefault(_form(traced, call), []).append(call)
    repeating = [
        members
        for form, members in families.items()
        if form is not None and len({id(call.layer) for call in members}) > 1
    ]
    chosen = {id(call) for members in repeating for call in members}
    if chosen:
        yield from _join(traced, [call for call in calls if id(call) in chosen])
    for index, call in zip(children.get(outer, []), calls, strict=True):
        if id(call) not in chosen:
            yield from _runs(traced, children, index)


def _join(traced: Traced, calls: list[LayerCall]) -> Iterator[Repeated]:
    """Calls that follow each other and are equal, as runs."""
    run: list[LayerCall] = []
    for call in calls:
        if run and (_form(traced, run[-1]) != _form(traced, call) or call.first < run[-1].last):
            yield Repeated(tuple(run))
            run = []
        run.append(call)
    yield Repeated(tuple(run))


def _form(traced: Traced, call: LayerCall) -> Hashable | None:
    """Equal for calls that do the same; None for one that is no block: without two ops, or without parameters."""
    ops = traced.ops_in(call)
    shapes = tuple(tuple(p.shape) for p in call.layer.parameters())
    if len(ops) < 2 or not shapes:
        return None
    return type(call.layer), shapes, tuple((op.name, tuple(v.shape for v in op.inputs)) for op in ops)
