"""A run of a Program in which sizes may be open, as in jax.export: what it computes from them stays an expression.

`shape(x)[0] * 2` is an integer array to an op that takes arrays, and to one that takes a size the expression
itself; an array cannot be a size. In branches and loops sizes are arrays only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from polyreme.core.op import ATTR
from polyreme.core.state import read
from polyreme.eager.tensor import Tensor
from polyreme.program import values
from polyreme.program.frame import Frame
from polyreme.program.operation import Call, Operation, function_of
from polyreme.program.program import Program
from polyreme.program.scope import Scope
from polyreme.program.values import Ref

_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "floor_divide": operator.floordiv,
    "mod": operator.mod,
}


class OpenFrame(Frame):
    """A frame that computes with open sizes."""

    def run(self) -> None:
        """Run every operation of the block."""
        self.sizes: dict[str, np.ndarray] = {}  # expressions of open sizes, as arrays of objects, by name
        for op in self.block.ops:
            value = self._computed(op) if isinstance(op, Call) else None
            if value is None:
                self._given_sizes(op).run(self)
                continue
            self.sizes[op.outputs[0]] = value
            flat = [jnp.asarray(n, jnp.int64) for n in value.reshape(-1)]
            self.define(op.outputs[0], Tensor(jnp.stack(flat).reshape(value.shape)))

    def _computed(self, op: Call) -> np.ndarray | None:
        """What op makes of open sizes alone; None if it does anything else."""
        first, *rest = op.args or (None,)
        if op.name == "shape" and isinstance(first, Ref):
            shape = read(self.get(first.name)).shape
            return _objects(shape) if any(map(jax_export.is_symbolic_dim, shape)) else None
        if op.name == "Tensor.__getitem__" and isinstance(first, Ref) and first.name in self.sizes:
            return None if values.refs(rest) else _objects(self.sizes[first.name][rest[0]])
        # add and subtract may scale their second operand
        if op.name in _ARITHMETIC and rest and all(v == 1 for v in (*rest[1:], *op.kwargs.values())):
            sides = [self._expression(first), self._expression(rest[0])]
            if not any(v is None for v in sides) and not all(type(v) is int for v in sides):
                return _objects(_ARITHMETIC[op.name](*sides))
        return None

    def _expression(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.sizes.get(value.name)
        return value if type(value) is int else None

    def _given_sizes(self, op: Operation) -> Operation:
        """op with expressions in place of names, where it takes sizes and not arrays."""
        if not isinstance(op, Call) or not self.sizes:
            return op
        declared = getattr(function_of(op.name), "op", None)
        kinds = dict(zip(declared.names, declared.kinds, strict=True)) if declared is not None else {}
        places = [*kinds.values(), *[None] * len(op.args)][: len(op.args)]
        args = tuple(self._put(v, kind) for v, kind in zip(op.args, places, strict=True))
        return replace(op, args=args, kwargs={k: self._put(v, kinds.get(k)) for k, v in op.kwargs.items()})

    def _put(self, value: Any, kind: str | None) -> Any:
        if isinstance(value, Ref):
            return self.sizes[value.name].tolist() if kind == ATTR and value.name in self.sizes else value
        if kind not in (ATTR, None) or not isinstance(value, (list, tuple)):
            return value
        return values.replace(value, Ref, lambda r: self.sizes[r.name].item() if self._is_one(r) else r)

    def _is_one(self, ref: Ref) -> bool:
        return ref.name in self.sizes and self.sizes[ref.name].size == 1


def _objects(value: Any) -> np.ndarray:
    """One expression, or several, as an array of objects."""
    if isinstance(value, np.ndarray):
        return value
    shape = (len(value),) if isinstance(value, tuple) else ()
    made = np.empty(shape, object)
    made[... if shape else ()] = value
    return made


def results_of(program: Program, scope: Scope, feeds: Mapping[str, Tensor], names: list[str]) -> list[Tensor]:
    """The values of these names, of a Program without backward."""
    frame = OpenFrame(program.global_block(), scope)
    frame.values.update(feeds)
    frame.run()
    return [Tensor(read(frame.get(name))) for name in names]
