"""Properties of a traced call that the planner needs, read off the primitives of its function and of the derivative."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from polyreme.core.taylor.primitives import REDUCTIONS
from polyreme.distributed.auto_parallel.dims.rules import CALLS
from polyreme.distributed.auto_parallel.dims.trace import TracedOp

_VIEWS = """
broadcast_in_dim convert_element_type copy copy_p dynamic_slice gather reshape slice split squeeze stop_gradient tile
transpose unstack
"""
"""Primitives whose result is the same numbers in another shape, or some of them: no pass over memory of their own."""

_CONSTANT = object()
"""Stands for every value that depends on no argument."""

_DEAR = {"erf": 2, "erfc": 2, "exp": 1, "exp2": 1, "expm1": 1, "log": 1, "log1p": 1, "logistic": 1, "tanh": 1}
"""Primitives that a compiler does not run twice to spare memory -> arrays that stay of each: the error function is made
by two formulas, of which one is chosen."""


class Step(NamedTuple):
    """One primitive: what it reads and makes, and the most elements of what it makes."""

    primitive: str
    operands: list[Any]
    results: list[Any]
    size: int


class Reads(NamedTuple):
    """The values that a derivative reads beside cotangents: positions of the call's inputs, whether its outputs, and
    how many dear values of the size of an output, in float32, that the call computes on the way."""

    inputs: frozenset[int] = frozenset()
    outputs: bool = False
    dear: int = 0


@dataclass
class CallFacts:
    """Facts of one call."""

    op: TracedOp

    @cached_property
    def steps(self) -> list[Step]:
        """The primitives of the function, those of functions that it calls in their places."""
        return _steps(self.op.jaxpr().jaxpr)[0]

    @property
    def only_moves(self) -> bool:
        """Whether the result is the input's elements in another shape, or some of them."""
        size, views = self.op.outputs[0].size, _VIEWS.split()
        return all(step.primitive in views for step in self.steps if step.size >= size)

    @property
    def reduces(self) -> bool:
        """Whether sums, or the like, over some dims are made on the way."""
        return any(step.primitive in REDUCTIONS.split() for step in self.steps)

    def read_by_derivative(self, wanted: Sequence[int]) -> Reads:
        """The values that the derivative with respect to the inputs at these positions, which are floating, reads."""
        if any(step.primitive == "while" for step in self.steps):
            return Reads(frozenset(wanted))  # such a loop has no backward to look at
        if not wanted:
            return Reads()
        op = self.op

        def both(arrays: list[Any]) -> tuple[list[Any], Any]:
            def fn(*chosen: Any) -> list[Any]:
                by_place = dict(zip(wanted, chosen, strict=True))
                return _floating(op.fn(*(by_place.get(i, x) for i, x in enumerate(arrays))))

            outputs, pullback = jax.vjp(fn, *(arrays[i] for i in wanted))
            return outputs, pullback([jnp.ones_like(out) for out in outputs])

        shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in op.inputs]
        steps, arguments, results = _steps(jax.make_jaxpr(both)(shapes).jaxpr)
        outputs, gradients = results[: -len(wanted)], results[-len(wanted) :]
        forward, size = _reached(steps, outputs), op.outputs[0].size
        dear = {
            step.results[0]: _DEAR[step.primitive]
            for step in steps
            if step.primitive in _DEAR and step.size >= size and step.results[0] in forward
        }
        reached = _reached(steps, gradients, {*outputs, *dear})
        return Reads(
            frozenset(i for i, value in enumerate(arguments) if value in reached),
            not reached.isdisjoint(outputs),
            sum(count for value, count in dear.items() if value in reached and value not in outputs),
        )


def _reached(steps: Sequence[Step], results: Iterable[Any], ends: Collection[Any] = ()) -> set[Any]:
    """The values that results are computed from, looking no further than the ends."""
    operands = {value: step.operands for step in steps for value in step.results}
    reached: set[Any] = set()
    ahead = list(results)
    while ahead:
        value = ahead.pop()
        if value not in reached:
            reached.add(value)
            ahead += () if value in ends else operands.get(value, ())
    return reached - {_CONSTANT}


def _floating(values: Any) -> list[Any]:
    return [value for value in jax.tree.leaves(values) if jnp.issubdtype(value.dtype, jnp.inexact)]


def _steps(jaxpr: Any) -> tuple[list[Step], list[Any], list[Any]]:
    """(primitives in order, arguments, results) of a jaxpr; each value is an object of its own."""
    steps: list[Step] = []
    arguments = [object() for _ in jaxpr.invars]
    return steps, arguments, _walk(jaxpr, arguments, steps)


def _walk(jaxpr: Any, arguments: Iterable[Any], steps: list[Step]) -> list[Any]:
    values: dict[Any, Any] = dict(zip(jaxpr.invars, arguments, strict=True))

    def value_of(atom: Any) -> Any:
        return _CONSTANT if isinstance(atom, Literal) else values.get(atom, _CONSTANT)

    for eqn in jaxpr.eqns:
        operands, name = [value_of(v) for v in eqn.invars], eqn.primitive.name
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")) if name in CALLS else None
        if inner is not None:
            results = _walk(getattr(inner, "jaxpr", inner), operands, steps)
        else:
            results = [object() for _ in eqn.outvars]
            steps.append(Step(name, operands, results, max((v.aval.size for v in eqn.outvars), default=0)))
        values.update(zip(eqn.outvars, results, strict=True))
    return [value_of(v) for v in jaxpr.outvars]
