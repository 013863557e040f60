"""One of two pieces of Python, chosen by a Tensor: both are traced, and become one kernel around jax.lax.cond."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from malt.operators import Undefined, UndefinedReturnValue

from polyreme.call_site import user_line
from polyreme.core import state
from polyreme.core.kernel import Kernel
from polyreme.core.state import TensorState
from polyreme.eager import tape
from polyreme.errors import CaptureError, ShapeError
from polyreme.jit.mutation import Known, accounting, own_all
from polyreme.jit.region import (
    NUMBERS,
    Ended,
    Inputs,
    Out,
    Region,
    adopt,
    adopt_grad,
    evaluate,
    name_of,
    refuse,
    separating,
    shown,
    trace,
    unify,
)
from polyreme.jit.structure import rebuild

_SAME = "give it the same shape, dtype and structure on both sides"
_TRUTH = Kernel(lambda x: jnp.reshape(x, ()).astype(bool), "truth")
_NOT = Kernel(lambda x: jnp.logical_not(jnp.reshape(x, ()).astype(bool)), "truth_not")


class OneSided(Undefined):
    """A variable that only one side of a statement defines; reading it says so."""

    message: str

    __slots__ = ("message",)

    def __init__(self, name: str, message: str) -> None:
        super().__init__(name)
        self.message = message

    def read(self) -> Any:
        raise CaptureError(f"{user_line()}: {self.message}")


def condition(value: TensorState) -> TensorState:
    """A one-element Tensor as a 0-D bool one."""
    array = state.read(value)
    if array.size != 1:
        raise ShapeError(
            f"{user_line()}: a condition needs a Tensor with one element, got shape {list(array.shape)}; use .any() or "
            ".all(), or index it"
        )
    if array.shape == () and array.dtype == bool:
        return value
    return tape.apply(_TRUTH, (array,), (None,))


def negation(value: TensorState) -> TensorState:
    """not value, as a 0-D bool Tensor that remembers what it is the opposite of."""
    given = condition(value)
    result = tape.apply(_NOT, (state.read(given),), (None,))
    result.opposite_of = given
    return result


def branch(
    pred: TensorState,
    runs: tuple[Callable[..., Any], Callable[..., Any]],
    names: Sequence[str],
    what: str,
    num_used: int | None = None,
) -> list[Any]:
    """The variables' values after runs[0]() if pred else runs[1](), each of which returns one value per name.

    num_used: the first so many are read afterwards. Raises CaptureError for values that differ in shape, dtype or
    structure between the sides.
    """
    used = len(names) if num_used is None else num_used
    if (recorder := state.recorder()) is not None:
        ends = recorder.cond(pred, *(lambda run=run: list(run())[:used] for run in runs))
        return [*ends, *(Undefined(name) for name in names[used:])]
    given = condition(pred)
    line = user_line()
    return accounting(lambda known: separating(lambda: _branch(known, given, runs, names, what, line, used)))


def _branch(
    known: Known,
    pred: TensorState,
    runs: tuple[Callable, Callable],
    names: Sequence[str],
    what: str,
    line: str,
    used: int,
) -> list[Any]:
    """The branch, with what it changes in Python objects as variables in front of its own."""
    shapes: list[list[Any]] = []
    changed: list[str] = []

    def side(run: Callable) -> Callable:
        def values() -> list[Any]:
            own_values = list(run())
            known.learn()
            shapes.append(known.shapes())
            changed[:] = known.names()
            return [*known.values(), *own_values]

        return values

    sides = (trace(side(runs[0])), trace(side(runs[1])))
    known.check(shapes[0], shapes[1], line, what, ("after the true side", "after the false one"))
    count = len(changed)
    results = _Branch(pred, sides, [*changed, *names], what, line, count + used).run()
    for value in results[:count]:
        if isinstance(value, OneSided):
            value.read()
    known.write(shapes[0], results[:count])
    return results[count:]


@dataclass
class _Slot:
    """One output of the kernel: how each side gets it, and whether it wants a gradient."""

    sides: tuple[tuple, tuple]
    shape: tuple[int, ...]
    dtype: Any
    stop_gradient: bool


class _Branch:
    def __init__(
        self,
        pred: TensorState,
        sides: tuple[Region, Region],
        names: Sequence[str],
        what: str,
        line: str,
        used: int,
    ) -> None:
        self.pred, self.sides, self.names, self.what, self.line, self.used = pred, sides, names, what, line, used
        self.inputs = Inputs(sides)
        self.slots: list[_Slot] = []

    def run(self) -> list[Any]:
        values = [self._merge(i) for i in range(len(self.names))]
        written = self._merge_written()
        grads = self._merge_grads()
        consts = [self.inputs.consts(side) for side in self.sides]
        results = self._apply(consts)
        for at, ended in written:
            adopt(ended, results[at])
        for at, tensor in grads:
            adopt_grad(tensor, None if at is None else results[at])
        return [
            v if spec is _FIXED else own_all(rebuild(spec, iter([_fill(x, results) for x in v]))) for spec, v in values
        ]

    def _apply(self, consts: list[list[int]]) -> list[TensorState]:
        sides, slots = self.sides, self.slots
        if not (slots or any(side.closed.effects for side in sides)):
            return []

        def fn(pred: Any, *arrays: Any) -> tuple:
            def side(which: int) -> list[Any]:
                outs = evaluate(sides[which], [arrays[c] for c in consts[which]])
                return [_fetch(s.sides[which], outs, arrays, s) for s in slots]

            return tuple(jax.lax.cond(pred, lambda: side(0), lambda: side(1)))

        arrays = (state.read(self.pred), *self.inputs.arrays)
        # a side may hand on a Tensor that wants gradients, under no_grad() too
        with tape.GradEnabled(not all(slot.stop_gradient for slot in slots)):
            results = tape.apply(Kernel(fn, "cond", saves=True), arrays, (None, *self.inputs.edges))
        for slot, result in zip(slots, results, strict=True):
            if slot.stop_gradient and not result.stop_gradient:
                result.stop_gradient, result._node = True, None
        return results

    def _slot(self, sides: tuple, shape: tuple[int, ...], dtype: Any, stop_gradient: bool) -> int:
        self.slots.append(_Slot(sides, shape, dtype, stop_gradient))
        return len(self.slots) - 1

    # variables

    def _merge(self, i: int) -> tuple[Any, Any]:
        a, b = (side.raw[i] for side in self.sides)
        if a is b:
            return _FIXED, a
        if isinstance(a, UndefinedReturnValue) or isinstance(b, UndefinedReturnValue):
            return self._fill_side(i, 0 if isinstance(b, UndefinedReturnValue) else 1)
        if isinstance(a, Undefined) or isinstance(b, Undefined):
            if isinstance(a, Undefined) and isinstance(b, Undefined):
                return _FIXED, a
            which = 0 if isinstance(b, Undefined) else 1
            if self._left(1 - which):
                return self._fill_side(i, which)
            return _FIXED, self._one_sided(self.names[i], ("true", "false")[which])
        (spec_a, leaves_a), (spec_b, leaves_b) = (side.values[i] for side in self.sides)
        if spec_a != spec_b:
            if i >= self.used:
                return _FIXED, self._unmerged(self.names[i])
            raise self._refusal(self.names[i], f"a {type(a).__name__}", f"a {type(b).__name__} of another structure")
        try:
            return spec_a, [self._leaf(self.names[i], x, y) for x, y in zip(leaves_a, leaves_b, strict=True)]
        except CaptureError:
            if i >= self.used:
                return _FIXED, self._unmerged(self.names[i])
            raise

    def _left(self, which: int) -> bool:
        """True if this side ends in return, break or continue: what follows is then skipped by the flag that it set."""
        raw = zip(self.names, self.sides[which].raw, strict=True)
        return any(value is True and name.startswith(_FLAGS) for name, value in raw)

    def _fill_side(self, i: int, which: int) -> tuple[Any, Any]:
        """Only this side has a value: zeros hold the place on the other, which a flag keeps from being used."""
        spec, leaves = self.sides[which].values[i]
        filled = []
        for leaf in leaves:
            if isinstance(leaf, Out):
                sides: list[tuple] = [("zeros",), ("zeros",)]
                sides[which] = ("out", leaf.index)
                filled.append(("slot", self._slot(tuple(sides), leaf.shape, leaf.dtype, leaf.stop_gradient)))
            else:
                filled.append(("value", leaf))
        return spec, filled

    def _one_sided(self, name: str, defined: str) -> OneSided:
        return OneSided(
            name,
            f"variable {name!r} is defined only in the {defined} branch of {self.what} at {self.line}, which "
            "depends on a "
            "Tensor; give it a value before, of the same shape and dtype",
        )

    def _unmerged(self, name: str) -> OneSided:
        return OneSided(
            name, f"variable {name!r} has different types after the two sides of {self.what} at {self.line}"
        )

    def _refusal(self, name: str, a: str, b: str) -> CaptureError:
        return refuse(
            self.line, self.what, f"variable {name!r}", f"{a} after the true side", f"{b} after the false one", _SAME
        )

    def _leaf(self, name: str, a: Any, b: Any) -> tuple:
        a, b = self._known_flag(a, True), self._known_flag(b, False)
        if isinstance(a, Out) and isinstance(b, Out) and a.tensor is b.tensor and not self._was_written(a.tensor):
            return ("value", a.tensor)
        if not isinstance(a, Out) and not isinstance(b, Out):
            if type(a) is bool and type(b) is bool and a != b:
                return ("value", self.pred if a else negation(self.pred))
            if a is b or (type(a) is type(b) and isinstance(a, (*NUMBERS, str)) and a == b):
                return ("value", a)
        kind = unify(a, b)
        if kind is None:
            raise self._refusal(name, shown(a), shown(b))
        stop = all(x.stop_gradient for x in (a, b) if isinstance(x, Out))
        return ("slot", self._slot((_getter(a), _getter(b)), *kind, stop))

    def _known_flag(self, leaf: Any, side: bool) -> Any:
        """The condition itself is True on the true side and False on the other."""
        if isinstance(leaf, Out):
            if leaf.tensor is self.pred:
                return side
            if leaf.tensor is getattr(self.pred, "opposite_of", None):
                return not side
        return leaf

    def _was_written(self, tensor: TensorState) -> bool:
        return any(id(tensor) in side.written for side in self.sides)

    # state

    def _merge_written(self) -> list[tuple[int, list[Ended]]]:
        merged = []
        for key in dict.fromkeys(k for side in self.sides for k in side.written):
            ended = [side.written[key] for side in self.sides if key in side.written]
            tensor = ended[0].tensor
            getters, kinds = [], []
            for side in self.sides:
                if key in side.written:
                    aval = side.closed.out_avals[side.written[key].out]
                    getters.append(("out", side.written[key].out))
                    kinds.append((aval.shape, aval.dtype))
                else:
                    array = state.read(tensor)
                    getters.append(("in", self.inputs.add(array, tape.edge_of(tensor))))
                    kinds.append((array.shape, array.dtype))
            if kinds[0] != kinds[1]:
                raise refuse(
                    self.line, self.what, name_of(tensor), f"changed to {_kind(kinds[0])} on the true side",
                    f"{_kind(kinds[1])} on the false one", _SAME,
                )  # fmt: skip
            at = self._slot(tuple(getters), *kinds[0], stop_gradient=not any(e.live for e in ended))
            merged.append((at, ended))
        return merged

    def _merge_grads(self) -> list[tuple[int | None, TensorState]]:
        merged: list[tuple[int | None, TensorState]] = []
        for key in dict.fromkeys(k for side in self.sides for k in side.grads):
            tensor = next(side.grads[key][0] for side in self.sides if key in side.grads)
            found = [side.grads[key][1] if key in side.grads else self._outer_grad(tensor) for side in self.sides]
            getters = [("out", f) if isinstance(f, int) else f for f in found]
            if (getters[0] is None) != (getters[1] is None):
                raise refuse(
                    self.line, self.what, f"the gradient of {name_of(tensor)}",
                    f"{'absent' if getters[0] is None else 'present'} after the true side",
                    f"{'absent' if getters[1] is None else 'present'} after the false one",
                    "call clear_grad() on both sides, or compute the gradient on both",
                )  # fmt: skip
            if getters[0] is None:
                merged.append((None, tensor))
            else:
                merged.append((self._slot(tuple(getters), tensor._array.shape, tensor._array.dtype, True), tensor))
        return merged

    def _outer_grad(self, tensor: TensorState) -> tuple | None:
        return None if tensor._grad is None else ("in", self.inputs.add(state.read(tensor._grad)))


_FIXED = object()
# names the transpiler gives to the flags that stand for return, break and continue
_FLAGS = ("do_return", "break_", "continue_")


def _kind(kind: tuple) -> str:
    return f"shape {list(kind[0])} dtype {kind[1].name}"


def _getter(leaf: Any) -> tuple:
    return ("out", leaf.index) if isinstance(leaf, Out) else ("number", leaf)


def _fetch(getter: tuple, outs: list, arrays: tuple, slot: _Slot) -> Any:
    match getter[0]:
        case "out":
            return outs[getter[1]].astype(slot.dtype)
        case "in":
            return arrays[getter[1]]
        case "number":
            return jnp.asarray(getter[1], slot.dtype)
        case _:
            return jnp.zeros(slot.shape, slot.dtype)


def _fill(leaf: tuple, results: list[TensorState]) -> Any:
    return leaf[1] if leaf[0] == "value" else results[leaf[1]]
