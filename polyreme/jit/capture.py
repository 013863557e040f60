"""Watches a function run once, and learns which persistent Tensors it reads and writes.

While a capture is active every Tensor read and write reports here (core.state). Tensors made inside belong
to the captured code; any other Tensor met is state: an input of the program, and an output if it was written. A branch
or loop body is watched by a capture of its own, inside the capture of the function.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import numpy as np

from polyreme.call_site import user_frame, user_line
from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.state import TensorState, Tracer
from polyreme.eager import tape
from polyreme.errors import CaptureError, HostValueError
from polyreme.jit.fusing import CapturedCalls
from polyreme.jit.scopes import Scopes
from polyreme.jit.sizes import KnownSizes
from polyreme.jit.surroundings import Surroundings

scopes: Scopes = Scopes(tape.next_number)

# code objects whose control flow was left as written -> why; jit.convert fills it, messages read it
unconverted: Any = weakref.WeakKeyDictionary()


class Border(tape.UnsavedNode):
    """Stands for what was computed before the captured code began: a backward inside may not go past it."""

    shape: tuple[int, ...]

    __slots__ = ("shape",)

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__("border", ())
        self.shape = shape

    def gradients(self, cotangents: list[Any], create_graph: bool) -> list[Any]:
        raise CaptureError(
            f"{user_line()}: backward() inside captured code (a to_static function, or a branch or loop that "
            "depends on a "
            f"Tensor) reached a Tensor of shape {list(self.shape)} computed before that code began; compute it "
            "inside too, "
            "or call backward() outside"
        )


@dataclass(frozen=True)
class Before:
    """A state Tensor as it was when the capture first met it."""

    tensor: TensorState
    array: Any
    grad: TensorState | None
    node: Any
    index: int
    stop_gradient: bool

    def restore(self) -> None:
        t = self.tensor
        t._array, t._grad, t._node, t._index, t.stop_gradient = (
            self.array,
            self.grad,
            self.node,
            self.index,
            self.stop_gradient,
        )

    @property
    def written(self) -> bool:
        return self.tensor._array is not self.array

    @property
    def regraded(self) -> bool:
        return self.tensor._grad is not self.grad

    @property
    def edge(self) -> tape.Edge:
        """The edge along which a gradient of the Tensor leaves the capture."""
        if self.stop_gradient:
            return None
        if self.node is not None:
            return (self.node, self.index)
        return self.tensor if dtypes.is_inexact(self.array.dtype) else None


def _as_written(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


class Capture:
    """Everything one run of a function touched, in the order it was first met.

    outer: the capture this one is inside. detach: gradients of the captured code will be taken by jax, which knows
    nothing of stop_gradient, so reads of such Tensors are cut off for it. converted: fn -> fn with its control flow
    converted. stages: the code is staged out, and its Tensors may have no values. fuses: calls that fit a pattern are
    made one, as far as nobody can tell. without_gradient: why its result has no gradient though it wants one, as the
    outermost capture is told.
    """

    fuses: bool
    calls: CapturedCalls

    stages: ClassVar[bool] = True
    records: ClassVar[Literal[False]] = False  # into a Program

    def __init__(
        self,
        outer: Capture | None = None,
        *,
        detach: bool = False,
        fuses: bool = False,
        converted: Callable[[Callable[..., Any]], Callable[..., Any]] = _as_written,
    ) -> None:
        self.outer = outer
        self.detach = detach
        self.converted = converted if outer is None else outer.converted
        self.before: dict[int, Before] = {}
        self.created_ids: dict[int, TensorState] = {}
        self.layers: dict[int, tuple[Any, bool, tuple]] = {} if outer is None else outer.layers
        self.fuses = fuses if outer is None else outer.fuses
        # buffers that other Tensors took the place of: the table of their Layer, their name in it, and they
        self.replaced: dict[tuple[int, str], tuple[dict, str, Any]] = {} if outer is None else outer.replaced
        self.calls = CapturedCalls()
        self.without_gradient: str | None = None
        self.surroundings: Surroundings = Surroundings() if outer is None else outer.surroundings
        self.sizes: KnownSizes = KnownSizes() if outer is None else outer.sizes

    def created(self, tensor: TensorState) -> None:
        """A Tensor made inside."""
        self.created_ids[id(tensor)] = tensor

    def touch(self, tensor: TensorState) -> None:
        """A Tensor that is about to be read or changed."""
        if tensor.own_form and (holder := tensor.holder) is not tensor:
            if holder is not None:
                self.touch(holder)
            return
        key = id(tensor)
        if key in self.created_ids or key in self.before:
            return
        if self.outer is not None:
            self.outer.touch(tensor)
        elif isinstance(tensor._array, Tracer):
            raise stale(tensor)
        self.before[key] = Before(
            tensor, tensor._array, tensor._grad, tensor._node, tensor._index, tensor.stop_gradient
        )
        if tensor._node is not None:
            tensor._node = Border(tensor._array.shape)

    def write(self, tensor: TensorState, array: Any) -> None:
        """Replace the tensor's array, noting state."""
        self.touch(tensor)
        self.sizes.forget(tensor)
        tensor._array = array

    def read(self, tensor: TensorState) -> Any:
        """The tensor's array, noting state."""
        self.touch(tensor)
        array = tensor._array
        if isinstance(array, state.Elsewhere):
            with jax.ensure_compile_time_eval():
                return array.read()
        if self.detach and tensor.stop_gradient and isinstance(array, Tracer) and dtypes.is_inexact(array.dtype):
            return jax.lax.stop_gradient(array)
        return array

    def copied(self, tensor: TensorState, made: TensorState) -> None:
        """A Tensor was made with the value of another."""

    def called(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """A declared function was called and gave a result."""
        self.sizes.note(name, args, kwargs, result)
        if self.fuses:
            self.calls.add(name, args, kwargs, result)

    def sizes_of(self, tensor: TensorState) -> np.ndarray | None:
        """A Tensor's numbers where they follow from shapes."""
        return self.sizes.of(tensor)

    def entered(self, layer: Any) -> Callable[..., Any]:
        """A Layer was called: its training flag becomes a guard. Returns the forward to run."""
        self.layers.setdefault(id(layer), (layer, layer.training, parts_of(layer)))
        self.surroundings.met(type(layer).__name__, layer)
        forward = self.converted(layer.forward)
        scopes.enter(layer)
        return forward

    def replaces(self, buffers: dict[str, Any], name: str) -> None:
        """Another Tensor is about to take a buffer's place in its Layer's table."""
        self.replaced.setdefault((id(buffers), name), (buffers, name, buffers[name]))

    def settle_buffers(self) -> None:
        """The code has run: what took a buffer's place becomes the value of the buffer, which is state."""
        # all are read before one is written: two buffers may have changed places
        ends = [
            (buffers, name, buffer, self.read(now), now._node, now._index, now.stop_gradient)
            for buffers, name, buffer, now in self._replacements()
        ]
        for buffers, name, buffer, array, node, index, stop_gradient in ends:
            self.write(buffer, array)
            buffer._node, buffer._index, buffer.stop_gradient = node, index, stop_gradient
            buffers[name] = buffer

    def _replacements(self) -> Iterator[tuple[dict, str, TensorState, TensorState]]:
        """Buffers in whose place is another Tensor of their shape and dtype."""
        for buffers, name, buffer in self.replaced.values():
            now = buffers.get(name)
            if now is buffer or id(buffer) in self.created_ids:
                continue
            if not (isinstance(buffer, TensorState) and isinstance(now, TensorState)):
                continue
            if (buffer._array.shape, buffer._array.dtype) == (now._array.shape, now._array.dtype):
                yield buffers, name, buffer, now

    def left(self) -> None:
        """The Layer entered last is done."""
        scopes.leave()

    def scope_of(self, node: Any) -> AbstractContextManager[Any]:
        """A context that names what is computed after the Layer in which the node was made."""
        return scopes.of(node)

    def has_value(self, tensor: TensorState) -> bool:
        """True for a constant made inside, which can be read on the host."""
        at: Capture | None = self
        while at is not None:
            if id(tensor) in at.created_ids:
                return not isinstance(tensor._array, Tracer)
            at = at.outer
        return False

    def host_read(self, tensor: TensorState, what: str) -> None:
        """Refuse a host read of anything but a constant made inside."""
        if self.has_value(tensor):
            return
        raise HostValueError(
            f"{user_line()}: {what} needs the value on the host, but this function is being captured into one "
            "program and "
            "has no values yet; return the Tensor and read it outside, use ops (where, cond, while_loop) instead of "
            f"Python control flow, or take @to_static away{_why_unconverted()}"
        )

    def restore(self) -> None:
        """Put every state Tensor back as it was."""
        for before in self.before.values():
            before.restore()
        if self.outer is None:
            for buffers, name, buffer, _ in self._replacements():  # the code ended in an error
                buffers[name] = buffer


def capture_in_progress() -> Capture | None:
    """The capture of this thread's code, or None; also None where a Program is recorded."""
    active = state.watch.active
    return active if isinstance(active, Capture) else None


@contextmanager
def watching(capture: Capture) -> Iterator[Capture]:
    """Make capture the active one inside the block; state is put back at the end, whatever happens."""
    outer = state.watch.active
    state.watch.active = capture
    try:
        yield capture
    finally:
        state.watch.active = outer
        capture.restore()


def parts_of(layer: Any) -> tuple[Any, ...]:
    """The parts of a Layer, hooks included: with other parts another program is captured."""
    tables = layer.__dict__
    found: list[Any] = []
    for name in ("_parameters", "_buffers", "_sub_layers", "_forward_pre_hooks", "_forward_post_hooks"):
        found += tables.get(name, {}).values()
    return tuple(found)


def same_parts(layer: Any, parts: tuple[Any, ...]) -> bool:
    """True if the Layer is still put together from these very objects."""
    now = parts_of(layer)
    return len(now) == len(parts) and all(map(operator.is_, now, parts))


def staged(value: Any) -> bool:
    """True for a Tensor whose value is not known while capturing."""
    active = state.watch.active
    return active is not None and isinstance(value, TensorState) and not active.has_value(value)


def nodes_behind(start: list[Any]) -> Iterator[Any]:
    """Every node reached from these."""
    stack, seen = list(start), set()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        stack.extend(e[0] for e in node.edges if isinstance(e, tuple))


def check_known_to_jax(ends: Sequence[TensorState], where: str) -> None:
    """Refuse a history that jax, differentiating the code as a whole, would not take as the tape does.

    ends: Tensors whose gradients will be asked for. where: the code, for the message.
    """
    for node in nodes_behind([t._node for t in ends if t._node is not None]):
        if node.hooks:
            raise CaptureError(
                f"{where}: register_hook on a Tensor computed inside captured code whose result wants gradients would "
                "never be called; register it outside, or capture the whole step with backward()"
            )
        if not (node.known_to_jax or isinstance(node, (tape.KernelNode, Border))):
            raise CaptureError(
                f"{where}: {node.name} defines its own backward, which captured code whose result wants gradients "
                "cannot use; capture the whole step with backward() inside, or leave this part uncaptured"
            )


def history_freed(tensor: TensorState) -> bool:
    """True if some backward has already freed what this Tensor was computed from."""
    return tensor._node is not None and any(node.freed for node in nodes_behind([tensor._node]))


def is_live(tensor: TensorState) -> bool:
    """True if the captured code left a history on this Tensor that gradients flow through."""
    return tensor._node is not None and not isinstance(tensor._node, Border) and not history_freed(tensor)


def stale(tensor: TensorState) -> CaptureError:
    """The error for a Tensor that outlived the captured code it was made in."""
    return CaptureError(
        f"{user_line()}: this Tensor (shape {list(tensor._array.shape)}) belongs to captured code that has ended "
        "(another function, or a branch or loop that depends on a Tensor); return it from there, or assign it to a "
        "variable there, instead of keeping it in a list or attribute outside"
    )


def _why_unconverted() -> str:
    frame = user_frame()
    reason = unconverted.get(frame.f_code) if frame is not None else None
    return f" (control flow on Tensors was not converted here: {reason})" if reason else ""
