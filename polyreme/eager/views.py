"""Parts of a Tensor, as x[0] and x[:, 1:] give them: what is written in place to one shows in the other.

Arrays here share no memory. So the Tensor and the parts of it that live know each other: writing to a part writes to
the Tensor, at the indices by which the part was taken, and writing to the Tensor takes its parts again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from polyreme.core import state
from polyreme.core.state import TensorState
from polyreme.eager import tape
from polyreme.eager.dispatch import take_over
from polyreme.ops.indices import subscripts

Step = tuple[list[Any], tuple[Any, ...]]
"""(arrays, spec) of an index without arrays, as ops.indices takes them."""


class _TakenPart(NamedTuple):
    """A part of a Tensor, the indices by which it was taken, and the entry of the first dim that it lies in, None where
    that is none or several."""

    ref: weakref.ref[TensorState]
    steps: tuple[Step, ...]
    entry: int | None


class Views:
    """A Tensor, and the parts that were taken of it by one index after the other."""

    def __init__(self, whole: Callable[[], TensorState | None], shape: tuple[int, ...], dtype: Any) -> None:
        self.whole, self.shape, self.dtype = whole, shape, dtype
        self._parts: list[_TakenPart] = []
        self._room = 8  # parts to list before those that are gone are looked for

    def add(self, part: TensorState, steps: tuple[Step, ...]) -> None:
        """Let part, which was just taken by these steps, belong here."""
        if len(self._parts) == self._room:
            self._parts = [listed for listed in self._parts if listed.ref() is not None]
            self._room = 8 + 2 * len(self._parts)
        self._parts.append(_TakenPart(weakref.ref(part), steps, _entry_of(steps)))
        part._views = self

    def steps_of(self, member: TensorState) -> tuple[Step, ...]:
        """The indices by which a member was taken; none for the whole."""
        if member is self.whole():
            return ()
        return next((listed.steps for listed in self._parts if listed.ref() is member), ())

    def written(self, target: TensorState, where: Step | None = None) -> None:
        """Bring the others in line with the member that was written to, at this index alone if one is given."""
        whole, steps = self.whole(), self.steps_of(target)
        if whole is None or (tuple(whole._array.shape), whole._array.dtype) != (self.shape, self.dtype):
            self._separate()
            return
        if steps:
            if _is_fixed(whole) or not _fits(target, _taken(whole, steps)):
                target._views = None
                self._parts = [listed for listed in self._parts if listed.ref() is not target]
                return
            take_over(whole, _with(whole, steps, target))
        entry = _entry_of(steps if where is None else (*steps, where))
        for listed in [p for p in self._parts if entry is None or p.entry is None or p.entry == entry]:
            part = listed.ref()
            if part is None or part is target or not _is_live(part):
                continue
            taken = _taken(whole, listed.steps)
            if _is_fixed(part):
                state.write_value(part, taken._array)
            else:
                take_over(part, taken)

    def _separate(self) -> None:
        """Let every member go its own way: the whole is gone, or has other elements."""
        for member in (self.whole(), *(listed.ref() for listed in self._parts)):
            if member is not None:
                member._views = None


def link(whole: TensorState, part: TensorState, arrays: list[Any], spec: tuple[Any, ...]) -> None:
    """Make part, which was just taken of whole, write to it and follow it."""
    views = getattr(whole, "_views", None)
    if views is None or views.whole() is None:  # of one that is gone, what is left is a whole of its own
        views = whole._views = Views(whole.lasting_ref(), tuple(whole._array.shape), whole._array.dtype)
    views.add(part, (*views.steps_of(whole), (arrays, spec)))


def _is_live(part: TensorState) -> bool:
    """Whether it is not one of captured code that has ended, which nobody can read any more."""
    if not isinstance(part._array, state.Tracer):
        return True
    watcher: Any = state.watch.active
    while watcher is not None:
        if id(part) in watcher.created_ids or id(part) in getattr(watcher, "before", ()):
            return True
        watcher = getattr(watcher, "outer", None)
    return False


def _taken(whole: TensorState, steps: tuple[Step, ...]) -> Any:
    value: Any = whole
    for arrays, spec in steps:
        value = subscripts.getitem(value, arrays, spec)
    return value


def _with(whole: TensorState, steps: tuple[Step, ...], part: TensorState) -> Any:
    """The whole with its part of these steps replaced."""
    (arrays, spec), *rest = steps
    value = _with(subscripts.getitem(whole, arrays, spec), tuple(rest), part) if rest else part
    return subscripts.setitem(whole, value, arrays, spec)


def _is_fixed(tensor: TensorState) -> bool:
    """Whether it is a leaf that wants a gradient, which nothing may be written to but under no_grad()."""
    return tape.grad_mode.enabled and not tensor.stop_gradient and (tensor._node is None or tensor.holder is not tensor)


def _fits(part: TensorState, taken: TensorState) -> bool:
    return (tuple(part._array.shape), part._array.dtype) == (tuple(taken._array.shape), taken._array.dtype)


def _entry_of(steps: tuple[Step, ...]) -> int | None:
    """The entry of the first dim that indices lie in, as x[0] and x[0, 1:]; None where that is none or several."""
    return int(steps[0][0][0]) if steps and steps[0][1][:1] == (("int",),) else None
