"""Watches a function run once, and learns which persistent Tensors it reads and writes.

Floor: 3.  While a capture is active every Tensor read and write reports here (core.state). Tensors made inside belong to
the captured function; any other Tensor met is state: an input of the program, and an output if it was written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyreme.core import state
from polyreme.core.state import TensorState, Tracer
from polyreme.errors import CaptureError

_PACKAGE = str(Path(__file__).resolve().parent.parent)


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


class Capture:
    """Everything one run of a function touched, in the order it was first met."""

    def __init__(self) -> None:
        self.before: dict[int, Before] = {}
        self.made: dict[int, TensorState] = {}
        self.layers: dict[int, tuple[Any, bool]] = {}

    def created(self, tensor: TensorState) -> None:
        """A Tensor made inside."""
        self.made[id(tensor)] = tensor

    def touch(self, tensor: TensorState) -> None:
        """A Tensor that is about to be read or changed."""
        key = id(tensor)
        if key not in self.made and key not in self.before:
            self.before[key] = Before(
                tensor, tensor._array, tensor._grad, tensor._node, tensor._index, tensor.stop_gradient
            )

    def read(self, tensor: TensorState) -> Any:
        """The tensor's array, noting state."""
        self.touch(tensor)
        return tensor._array

    def entered(self, layer: Any) -> None:
        """A Layer was called; its training flag becomes a guard."""
        self.layers.setdefault(id(layer), (layer, layer.training))

    def host_read(self, tensor: TensorState, what: str) -> None:
        """Refuse a host read of anything but a constant made inside."""
        if id(tensor) in self.made and not isinstance(tensor._array, Tracer):
            return
        raise CaptureError(
            f"{user_line()}: {what} needs the value on the host, but this function is being captured into one program and "
            "has no values yet; return the Tensor and read it outside, use ops (where, cond, while_loop) instead of "
            "Python control flow, or take @to_static away"
        )

    def restore(self) -> None:
        """Put every state Tensor back as it was."""
        for before in self.before.values():
            before.restore()


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


def user_line() -> str:
    """file:line (and its text's place) of the innermost frame that is not polyreme's own."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "unknown line"


def where_defined(fn: Callable[..., Any]) -> str:
    """name (file:line) of a function, for messages."""
    code = getattr(fn, "__code__", None)
    name = getattr(fn, "__qualname__", type(fn).__name__)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name
