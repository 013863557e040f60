"""Cutting a recorded forward into chunks that cost about the same.

The price of a chunk is its arithmetic and what it sends and receives; the dearest chunk sets the pace, so
the cuts make that one as cheap as can be.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from polyreme.core import state
from polyreme.core.symbol import Symbol
from polyreme.distributed.auto_parallel.stages.cut import AtEnds, live_bytes, whole_calls
from polyreme.distributed.auto_parallel.stages.record import Recorded, run
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.jit.capture import Capture, watching
from polyreme.program.operation import Call

FLOP_PER_BYTE = 256
"""What sending a byte is held to cost: a device's FLOP a second over a link's bytes a second, of today's in order."""


def evenly(recorded: Recorded, count: int) -> AtEnds:
    """Cuts at ends of Layer calls into `count` chunks, the dearest of which is as cheap as can be.

    Raises ConfigError if the model calls fewer Layers than that takes.
    """
    calls = whole_calls(recorded)
    if len(calls) < count - 1:
        raise ConfigError(
            f"a model whose forward calls {len(calls)} Layers one after another cannot be cut at their ends into "
            f"{count} chunks; lower pp or virtual_stages, or write it in more Layers"
        )
    ends = [0, *(c.last for c in calls), len(recorded.ops)]
    done = np.concatenate([[0.0], np.cumsum(costs(recorded))])[ends]
    sent = FLOP_PER_BYTE * np.asarray([0.0, *live_bytes(recorded, ends[1:-1]), 0.0])
    chosen = _balance(done, sent, count)
    return AtEnds(tuple((calls[at - 1].name, calls[at - 1].number) for at in chosen))


def _balance(done: np.ndarray, sent: np.ndarray, count: int) -> list[int]:
    """Places, of those that done and sent tell of, at which `count` chunks end, the last left out.

    done: arithmetic before each place. sent: the price of a cut there.
    """
    price = done[None, :] - done[:, None] + sent[:, None] + sent[None, :]
    size = len(done)
    price[np.tril_indices(size)] = math.inf  # a chunk has something to do
    best, before = price[0], []
    for _ in range(count - 1):
        dearest = np.maximum(best[:, None], price)
        before.append(dearest.argmin(axis=0))
        best = dearest.min(axis=0)
    at, found = size - 1, []
    for choice in reversed(before):
        at = int(choice[at])
        found.append(at)
    return found[::-1]


def costs(recorded: Recorded) -> list[int]:
    """FLOP of each operation, forward: 2 a multiply-add of products and convolutions, 1 an element of all else."""
    known: dict[Any, int] = {}
    result = []
    for index, op in enumerate(recorded.ops):
        shapes = tuple((tuple(a.shape), str(a.dtype)) for a in map(recorded.value, op.reads()))
        # calls of one function on like values cost the same; what is told apart is everything but names
        key = (op.name, _unnamed(op), shapes) if isinstance(op, Call) else index
        if key not in known:
            known[key] = _cost(recorded, index)
        result.append(known[key])
    return result


def _unnamed(op: Call) -> str:
    text = repr((op.args, op.kwargs))
    for at, name in enumerate(op.reads()):
        text = text.replace(f"%{name}", f"%{at}")
    return text


def _cost(recorded: Recorded, index: int) -> int:
    op = recorded.ops[index]
    names = [n for n in dict.fromkeys(op.reads()) if n not in recorded.captured]
    shapes = [_abstract(recorded.value(n)) for n in names]

    def compute(arrays: list[Any]) -> list[Any]:
        with watching(Capture()), tape.GradEnabled(False):
            outs = run(recorded, [index], {n: Tensor(a) for n, a in zip(names, arrays, strict=True)}, op.outputs)
            return [out._array for out in outs]

    with jax.ensure_compile_time_eval():
        outer, state.watch.active = state.watch.active, None
        try:
            return _flop(jax.make_jaxpr(compute)(shapes).jaxpr)
        finally:
            state.watch.active = outer


def _abstract(array: Any) -> Any:
    if isinstance(array, Symbol) and array.known is not None:
        return array.known[0]
    return jax.ShapeDtypeStruct(tuple(array.shape), array.dtype)


def _flop(jaxpr: Jaxpr) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        inner = [v for p in eqn.params.values() for v in (p if isinstance(p, (tuple, list)) else (p,))]
        bodies = [v.jaxpr if isinstance(v, ClosedJaxpr) else v for v in inner if isinstance(v, (ClosedJaxpr, Jaxpr))]
        if bodies:
            each = [_flop(body) for body in bodies]
            # of branches one runs
            total += max(each) if eqn.primitive.name == "cond" else sum(each) * int(eqn.params.get("length", 1))
        elif eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            total += 2 * _size(eqn.outvars[0]) * math.prod(_shape(eqn.invars[0])[d] for d in contracted)
        elif eqn.primitive.name == "conv_general_dilated":
            kernel = _shape(eqn.invars[1])
            out_dim = eqn.params["dimension_numbers"].rhs_spec[0]
            total += 2 * _size(eqn.outvars[0]) * math.prod(kernel) // kernel[out_dim]
        else:
            total += sum(map(_size, eqn.outvars))
    return total


def _size(var: Any) -> int:
    return math.prod(_shape(var))


def _shape(var: Any) -> tuple[int, ...]:
    return tuple(getattr(var.aval, "shape", ()))
