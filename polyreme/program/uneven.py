"""Parts of different sizes: devices of one compiled program each take the branch compiled for the size of their part.

Devices must come to a reduction together, so the operations up to the last backward are in the branches, and
the reductions and everything after them is done by all alike. Values leave the branches padded to the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from polyreme.core import state
from polyreme.core.state import TensorState, Tracer
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import ProgramError
from polyreme.jit.control_flow import switch_case
from polyreme.program.frame import Frame
from polyreme.program.operation import Operation
from polyreme.program.parts import Shapes
from polyreme.program.program import Program
from polyreme.program.run import shapes_of
from polyreme.program.scope import Scope
from polyreme.program.training import Backward, Optimize


class Uneven:
    """How a Program is run on parts of these shapes, one for each device. fetch_shapes: name -> its shape on each.

    Raises ProgramError for a Program that cannot be cut in two at its backward.
    """

    fetch_shapes: dict[str, list[tuple[Any, ...] | tuple[int, ...]]]

    def __init__(
        self, program: Program, scope: Scope, shapes: Sequence[Shapes], dtypes: Mapping[str, Any], names: Sequence[str]
    ) -> None:
        self._program, self._scope, self._names = program, scope, names
        block = program.global_block()
        self._kinds = [dict(s) for s in dict.fromkeys(shapes)]
        self._which = [self._kinds.index(dict(s)) for s in shapes]
        ends = [i for i, op in enumerate(block.ops) if isinstance(op, Backward)]
        self._ops = (block.ops[: ends[-1] + 1], block.ops[ends[-1] + 1 :]) if ends else (block.ops, [])
        self._gradients = {n: of for op in block.ops if isinstance(op, Backward)
                           for n, of in zip(op.outputs, op.inputs, strict=True)}  # fmt: skip
        first, rest = self._ops
        self._check(first)
        made = {*self._kinds[0], *(n for op in first for n in op.outputs)}
        used = [n for op in rest for n in op.reads()]
        self._crossing = [n for n in dict.fromkeys([*self._gradients, *used, *names]) if n in made]
        wanted = list(dict.fromkeys([*self._crossing, *names]))
        inferred = [dict(zip(wanted, self._inferred(kind, dtypes, wanted), strict=True)) for kind in self._kinds]
        self._largest = {n: tuple(map(max, zip(*(f[n] for f in inferred), strict=True))) for n in self._crossing}
        for name in used:
            if name in self._crossing and any(f[name] != self._largest[name] for f in inferred):
                raise self._refused(f"{name!r}, whose size differs, is used after the gradients")
        self.fetch_shapes = {n: [inferred[kind][n] or (1,) for kind in self._which] for n in names}

    def _inferred(self, kind: Mapping[str, tuple], dtypes: Mapping[str, Any], names: list[str]) -> list[tuple]:
        feeds = {n: jax.ShapeDtypeStruct(shape, dtypes[n]) for n, shape in kind.items()}
        return shapes_of(self._program, self._scope, feeds, names)

    def _check(self, first: Sequence[Operation]) -> None:
        for op in first:
            if isinstance(op, Optimize) or not self._gradients.keys().isdisjoint(op.reads()):
                raise self._refused(f"a {op.kind} comes before the last gradients")

    def _refused(self, why: str) -> ProgramError:
        sizes = [{n: list(s) for n, s in kind.items()} for kind in self._kinds]
        return ProgramError(
            f"feed: devices get parts of different sizes, {sizes}, which this Program cannot be run on: {why}; feed as "
            "many samples, and rows, for each device"
        )

    def results(
        self, feeds: Mapping[str, TensorState], device: Any, reduced: Callable[[str, Tensor], Tensor]
    ) -> list[Tensor]:
        """The values of the names on a device; fetches are padded."""
        table = jnp.asarray(self._which)[device]
        which: Any = Tensor(table) if isinstance(table, Tracer) else self._which[device]
        frame = Frame(self._program.global_block(), self._scope, reduced=reduced)
        values = switch_case(which, [lambda kind=kind: self._part(feeds, kind) for kind in self._kinds])
        for name, value in zip(self._crossing, values, strict=True):
            of = self._gradients.get(name)
            frame.values[name] = value if of is None else reduced(of, value)
        with tape.GradEnabled(False):
            for op in self._ops[1]:
                op.run(frame)
        return [Tensor(state.read(frame.get(name))) for name in self._names]

    def _part(self, feeds: Mapping[str, TensorState], kind: Mapping[str, tuple[int, ...]]) -> list[Tensor]:
        """What crosses, on a part of this kind."""
        block = self._program.global_block()
        frame = Frame(block, self._scope)
        for name, shape in kind.items():
            own = state.read(feeds[name])[tuple(slice(0, s) for s in shape)]
            frame.values[name] = Tensor(own, stop_gradient=block.vars[name].stop_gradient)
        with tape.GradEnabled(any(isinstance(op, Backward) for op in self._ops[0])):
            for op in self._ops[0]:
                op.run(frame)
        return [Tensor(_pad(state.read(frame.get(n)), self._largest[n])) for n in self._crossing]


def _pad(array: Any, shape: tuple[int, ...]) -> Any:
    if tuple(array.shape) == shape:
        return array
    return jnp.pad(array, [(0, most - size) for size, most in zip(array.shape, shape, strict=True)])
