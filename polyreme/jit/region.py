"""A branch or loop body run once on tracers: a jaxpr, and what it does to variables, state and gradients.

Tensors of the surrounding code are met as state (jit.capture); what the jaxpr closes over becomes the inputs
of one kernel, so the whole statement is one node of the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from polyreme.call_site import user_line
from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.devices.abstract import original
from polyreme.core.state import TensorState
from polyreme.eager import tape
from polyreme.errors import CaptureError
from polyreme.jit.capture import capture_in_progress, check_known_to_jax, history_freed, is_live, watching
from polyreme.jit.mutation import RegionCapture
from polyreme.jit.structure import Spec, flatten, rebuild

# each level takes some thirty Python frames, of the thousand that Python allows
_DEEPEST = 16
NUMBERS = (bool, int, float, complex, np.generic)


@dataclass
class Ended:
    """A state Tensor at the end of a region: its array's place among the outputs, and its tape flags."""

    tensor: TensorState
    out: int
    live: bool


@dataclass
class Region:
    """One traced run. outs: the arrays the jaxpr returns, by position in `leaves`, `written` and `grads`.

    values: per variable its spec and leaves; a Tensor leaf is given as an Out. grads: id -> (tensor, output or None) of
    every Tensor whose gradient came or went.
    """

    capture: RegionCapture
    closed: Any = None
    values: list[tuple[Spec, list[Any]]] = field(default_factory=list)
    raw: list[Any] = field(default_factory=list)
    written: dict[int, Ended] = field(default_factory=dict)
    grads: dict[int, tuple[TensorState, int | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Out:
    """A Tensor leaf: the output that is its array, and the Tensor itself (to be compared by identity only)."""

    index: int
    tensor: TensorState
    shape: tuple[int, ...]
    dtype: np.dtype
    stop_gradient: bool


def trace(run: Callable[..., Sequence[Any]], avals: Sequence[Any] = ()) -> Region:
    """Run Python once on tracers of these shapes and dtypes; run returns the variables' values."""
    region = Region(RegionCapture(capture_in_progress()))
    if region.capture.depth > _DEEPEST:
        raise CaptureError(
            f"{user_line()}: branches and loops on Tensors are nested more than {_DEEPEST} deep; a function "
            "whose recursion ends by the value of a Tensor cannot be captured: write a while loop, or stop at a "
            "Python number"
        )

    def stage(*arrays: Any) -> list[Any]:
        with watching(region.capture):
            region.raw = list(run(*arrays))
            return _collect(region)

    region.closed = jax.make_jaxpr(stage)(*avals)
    return region


def _collect(region: Region) -> list[Any]:
    capture, outs = region.capture, []

    def out(array: Any) -> int:
        outs.append(array)
        return len(outs) - 1

    for value in region.raw:
        leaves: list[Any] = []
        spec = flatten(value, leaves)
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, TensorState):
                array = capture.read(leaf)
                stop = leaf.stop_gradient or history_freed(leaf)
                leaves[at] = Out(out(array), leaf, array.shape, array.dtype, stop)
        region.values.append((spec, leaves))
    for key, before in list(capture.before.items()):
        tensor = before.tensor
        if before.written:
            region.written[key] = Ended(tensor, out(tensor._array), is_live(tensor))
        if before.regraded:
            grad = tensor._grad
            region.grads[key] = (tensor, None if grad is None else out(capture.read(grad)))
    ends = [x.tensor for _, leaves in region.values for x in leaves if isinstance(x, Out) and not x.stop_gradient]
    check_known_to_jax([*ends, *(e.tensor for e in region.written.values() if e.live)], user_line())
    return outs


class Inputs:
    """The arrays one kernel takes, each once, with the edges gradients flow back along."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.arrays: list[Any] = []
        self.edges: list[tape.Edge] = []
        self._index_of: dict[int, int] = {}
        known: dict[int, tape.Edge] = {}
        for before in (b for r in regions for b in r.capture.before.values()):
            if before.edge is None:
                continue
            other = known.setdefault(id(before.array), before.edge)
            if tape.edge_key(other) != tape.edge_key(before.edge):
                raise SharedArrayError(before.tensor)
        self._known = known
        for region in regions:  # this is the run of them that counts
            around = region.capture.outer
            if around is not None:
                around.calls.fused += region.capture.calls.fused

    def add(self, array: Any, edge: tape.Edge = None) -> int:
        """The position of array among the inputs."""
        index = self._index_of.get(id(array))
        if index is None:
            index = self._index_of[id(array)] = len(self.arrays)
            self.arrays.append(array)
            self.edges.append(edge if edge is not None else self._known.get(id(array)))
        return index

    def consts(self, region: Region) -> list[int]:
        """Positions of what a region's jaxpr closes over."""
        return [self.add(original(c)) for c in region.closed.consts]


class SharedArrayError(Exception):
    """Two Tensors that want separate gradients share one array; give tensor one of its own and trace again."""

    def __init__(self, tensor: TensorState) -> None:
        super().__init__("shared array")
        self.tensor = tensor


def separating(build: Callable[[], Any]) -> Any:
    """build(), again with an array of its own for each Tensor that was found to share one."""
    while True:
        try:
            return build()
        except SharedArrayError as shared:
            shared.tensor._array = jnp.copy(state.read(shared.tensor))


def evaluate(region: Region, consts: Sequence[Any], *args: Any) -> list[Any]:
    """The region's outputs."""
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(region.closed.jaxpr, list(consts)))(*args)


def returned(region: Region, results: Mapping[int, TensorState] | Sequence[TensorState]) -> Any:
    """The one value of a region, around the Tensors that a kernel gave for its outputs, by their index."""
    spec, leaves = region.values[0]
    built = []
    for leaf in leaves:
        if not isinstance(leaf, Out):
            built.append(leaf)
        elif id(leaf.tensor) not in region.capture.created_ids:
            built.append(leaf.tensor)  # an input, handed through
        else:
            tensor = results[leaf.index]
            if leaf.stop_gradient and not tensor.stop_gradient:
                tensor.stop_gradient, tensor._node = True, None
            built.append(tensor)
    return rebuild(spec, iter(built))


def number_dtype(value: Any, beside: np.dtype | None = None) -> np.dtype:
    """The dtype a Python number takes: beside's if it fits there, else that of to_tensor."""
    if isinstance(value, np.generic):
        return value.dtype
    if beside is not None and jnp.result_type(beside, type(value)) == beside:
        return beside
    if isinstance(value, bool):
        return dtypes.bool_
    if isinstance(value, int):
        return dtypes.int64
    return dtypes.default_dtype() if isinstance(value, float) else dtypes.complex64


def shown(leaf: Any) -> str:
    """A leaf for a message."""
    if isinstance(leaf, Out):
        return f"a Tensor of shape {list(leaf.shape)} and dtype {leaf.dtype.name}"
    return f"{leaf!r} ({type(leaf).__name__})"


def unify(a: Any, b: Any) -> tuple[tuple[int, ...], np.dtype] | None:
    """Shape and dtype two leaves (Outs or numbers) can both take, or None."""
    if isinstance(a, Out) and isinstance(b, Out):
        return (a.shape, a.dtype) if (a.shape, a.dtype) == (b.shape, b.dtype) else None
    if isinstance(b, Out):
        a, b = b, a
    if isinstance(a, Out) and isinstance(b, NUMBERS):
        return ((), a.dtype) if a.shape == () and number_dtype(b, a.dtype) == a.dtype else None
    if isinstance(a, NUMBERS) and isinstance(b, NUMBERS):
        x, y = number_dtype(a), number_dtype(b)
        return (), number_dtype(a, y) if number_dtype(a, y) == y else number_dtype(b, x)
    return None


def adopt_grad(tensor: TensorState, gradient: TensorState | None) -> None:
    """Set a gradient that a region left, telling the capture around it."""
    state.touch(tensor)
    tensor._grad = gradient


def adopt(ended: Sequence[Ended], result: TensorState) -> None:
    """Set the new array of a written state Tensor, and its place on the tape where a region changed that."""
    tensor = ended[0].tensor
    state.write(tensor, result._array)
    if any(e.live for e in ended):
        tensor._node, tensor._index, tensor.stop_gradient = result._node, result._index, result.stop_gradient


def name_of(tensor: TensorState) -> str:
    """A state Tensor for a message."""
    return f"{getattr(tensor, '_name', None) or type(tensor).__name__} of shape {list(tensor._array.shape)}"


def refuse(line: str, what: str, name: str, one: str, other: str, remedy: str) -> CaptureError:
    """The error for two sides that do not fit."""
    return CaptureError(f"{line}: {what} depends on a Tensor, and {name} is {one} but {other}; {remedy}")
