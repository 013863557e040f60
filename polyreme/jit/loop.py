"""A loop whose number of steps depends on a Tensor: test and body are traced, and become one kernel around a jax loop.

What the body changes is found by tracing it: variables and state that change are carried, all else is
constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from malt.operators import Undefined, UndefinedReturnValue

from polyreme.call_site import user_line
from polyreme.core import state
from polyreme.core.kernel import Kernel
from polyreme.core.state import TensorState
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, HostValueError
from polyreme.jit.branch import OneSided, condition
from polyreme.jit.capture import Capture
from polyreme.jit.mutation import Known, accounting, own_all
from polyreme.jit.region import (
    NUMBERS,
    Inputs,
    Out,
    Region,
    adopt,
    evaluate,
    name_of,
    number_dtype,
    refuse,
    separating,
    shown,
    trace,
    unify,
)
from polyreme.jit.structure import LEAF, flatten, rebuild

# each attempt finds more that is carried, or widens a type; real loops need two or three
_MAX_ATTEMPTS = 10


@dataclass(frozen=True)
class _Kind:
    """Type of one carried value."""

    shape: tuple[int, ...]
    dtype: Any
    stop_gradient: bool

    def aval(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


def loop(
    test: Callable[[], Any],
    body: Callable[[], None],
    get: Callable[[], Sequence[Any]],
    put: Callable[[Sequence[Any]], None],
    names: Sequence[str],
    what: str,
    maximum: int | None = None,
) -> None:
    """Run body() while test() is true, on the variables that get and put move.

    maximum: a bound on the number of steps; with one, gradients flow through the loop, at the cost of always running
    that many. Raises CaptureError for a variable that changes shape, dtype or structure from one step to the next.
    """
    if (recorder := state.recorder()) is not None:
        _record(recorder, test, body, get, put, maximum)
        return
    line = user_line()
    accounting(lambda known: separating(lambda: _loop(known, test, body, get, put, names, what, line, maximum)))


def _record(
    recorder: state.ProgramRecorder, test: Callable, body: Callable, get: Callable, put: Callable, maximum: int | None
) -> None:
    """The loop as an operation of a static Program, which carries Tensors and numbers; other variables stay."""
    start = list(get())
    carried = [i for i, value in enumerate(start) if isinstance(value, (TensorState, int, float, complex))]

    def fill(now: Sequence[Any]) -> None:
        values = list(start)
        for at, value in zip(carried, now, strict=True):
            values[at] = value
        put(values)

    def tested(*now: Any) -> Any:
        fill(now)
        return test()

    def step(*now: Any) -> list[Any]:
        fill(now)
        body()
        ends = list(get())
        return [ends[index] for index in carried]

    fill(recorder.while_loop(tested, step, [start[index] for index in carried], maximum))


def _loop(
    known: Known, test: Callable, body: Callable, get: Callable, put: Callable, names: Sequence[str], what: str,
    line: str, maximum: int | None,
) -> None:  # fmt: skip
    """The loop, with what it changes in Python objects as variables in front of its own."""
    changed, shapes = known.names(), known.shapes()
    count = len(changed)
    for name, value in zip(changed, known.values(), strict=True):
        if isinstance(value, Undefined):
            _first_inside(name, what, line).read()

    def tested() -> Any:
        before = known.values()
        value = test()
        known.learn()
        if known.shapes() != shapes or any(a is not b for a, b in zip(before, known.values(), strict=True)):
            raise _test_changes(line, what, "a list, dict, set or attribute")
        return value

    def step() -> None:
        body()
        known.learn()
        known.check(shapes, known.shapes(), line, what, ("before a step", "after it"))

    def put_all(values: Sequence[Any]) -> None:
        known.write(shapes, values[:count])
        put(tuple(values[count:]))

    _Loop(tested, step, lambda: [*known.values(), *get()], put_all, [*changed, *names], what, line, maximum).run()


class _Loop:
    def __init__(
        self,
        test: Callable,
        body: Callable,
        get: Callable,
        put: Callable,
        names: Sequence[str],
        what: str,
        line: str,
        maximum: int | None,
    ) -> None:
        self.test, self.body, self.get, self.put = test, body, get, put
        self.names, self.what, self.line, self.maximum = names, what, line, maximum
        self.init = list(get())
        self.specs: list[Any] = []
        self.leaves: list[list[Any]] = []
        for name, value in zip(names, self.init, strict=True):
            leaves: list[Any] = []
            if isinstance(value, Undefined):
                value = _first_inside(name, self.what, self.line)
            self.specs.append(flatten(value, leaves))
            self.leaves.append(leaves)
        # (variable, leaf) -> type of what is carried
        self.carried: dict[tuple[int, int], _Kind] = {}
        self.state: dict[int, TensorState] = {}
        self.placed: Sequence[Any] = ()

    def run(self) -> None:
        try:
            check, step = self._settle()
        finally:
            self.put(self.init)
        results = self._apply(check, step)
        count = len(self.carried)
        by_leaf = dict(zip(self.carried, results[:count], strict=True))
        for (key, tensor), result in zip(self.state.items(), results[count:], strict=True):
            adopt([step.written[key]], result)
            del tensor
        self.put([self._value(i, by_leaf) for i in range(len(self.names))])

    def _value(self, i: int, by_leaf: dict) -> Any:
        if isinstance(self.init[i], Undefined):
            return _first_inside(self.names[i], self.what, self.line)
        if self.specs[i] is LEAF:
            return by_leaf.get((i, 0), self.leaves[i][0])
        return own_all(
            rebuild(self.specs[i], iter([by_leaf.get((i, j), leaf) for j, leaf in enumerate(self.leaves[i])]))
        )

    # tracing

    def _settle(self) -> tuple[Region, Region]:
        """Trace until nothing new is found to change."""
        for _ in range(_MAX_ATTEMPTS):
            before = (dict(self.carried), list(self.state))
            check = trace(lambda *arrays: self._start(arrays) or [self._tested()], self._avals())
            self.put(self.init)
            step = trace(lambda *arrays: self._start(arrays) or self._stepped(), self._avals())
            self.put(self.init)
            self._learn(step)
            if any(key not in self.state for key in check.written):
                raise _test_changes(self.line, self.what, "a Tensor")
            if before == (self.carried, list(self.state)):
                return check, step
        raise CaptureError(f"{self.line}: {self.what} keeps changing the types of its variables from step to step")

    def _avals(self) -> list[Any]:
        held = [state.read(t) for t in self.state.values()]
        return [
            *(k.aval() for k in self.carried.values()),
            *(jax.ShapeDtypeStruct(h.shape, h.dtype) for h in held),
        ]

    def _start(self, arrays: Sequence[Any]) -> None:
        """Variables and state as they are at the start of some step."""
        kinds = self.carried.items()
        leaves = {at: Tensor(a, stop_gradient=k.stop_gradient) for (at, k), a in zip(kinds, arrays, strict=False)}
        self.now = [self._value(i, leaves) for i in range(len(self.names))]
        self.put(self.now)
        for tensor, array in zip(self.state.values(), arrays[len(leaves) :], strict=True):
            state.touch(tensor)
            tensor._array = array
        self.placed = arrays[len(leaves) :]

    def _tested(self) -> Any:
        value = self.test()
        if any(t._array is not a for t, a in zip(self.state.values(), self.placed, strict=True)):
            raise _test_changes(self.line, self.what, "a Tensor")
        return condition(value) if isinstance(value, TensorState) else bool(value)

    def _stepped(self) -> Sequence[Any]:
        self.body()
        return list(self.get())

    def _learn(self, step: Region) -> None:
        """Note what the body changed, and what types that needs."""
        if step.grads:
            tensor = next(t for t, _ in step.grads.values())
            raise CaptureError(
                f"{self.line}: the body of {self.what} leaves a gradient on {name_of(tensor)} that was not there "
                "before it, "
                "or takes one away; compute and clear gradients inside one step"
            )
        for key, ended in step.written.items():
            self.state.setdefault(key, ended.tensor)
            have, now = state.read(ended.tensor), step.closed.out_avals[ended.out]
            if (have.shape, have.dtype) != (now.shape, now.dtype):
                raise self._refusal(
                    name_of(ended.tensor), f"{list(have.shape)} {have.dtype}", f"{list(now.shape)} {now.dtype}"
                )
        for i, name in enumerate(self.names):
            if not isinstance(self.init[i], Undefined):
                self._learn_variable(i, name, step)

    def _learn_variable(self, i: int, name: str, step: Region) -> None:
        if step.raw[i] is self.now[i] and self.specs[i] is LEAF:
            return
        spec, finals = step.values[i]
        if isinstance(self.init[i], UndefinedReturnValue) and self.leaves[i][0] is self.init[i]:
            # not returned yet: zeros hold the place, which a flag keeps from being used
            self.specs[i] = spec
            self.leaves[i] = [
                Tensor(jnp.zeros(f.shape, f.dtype), stop_gradient=f.stop_gradient) if isinstance(f, Out) else f
                for f in finals
            ]
        if spec != self.specs[i]:
            raise self._refusal(f"variable {name!r}", f"a {type(self.now[i]).__name__}", "of another structure")
        for j, final in enumerate(finals):
            self._learn_leaf(name, (i, j), self.leaves[i][j], final)

    def _learn_leaf(self, name: str, key: tuple[int, int], init: Any, final: Any) -> None:
        kind = self.carried.get(key)
        if kind is None and not _changed(init, final):
            return
        now = _outside(init) if kind is None else Out(0, init, kind.shape, kind.dtype, kind.stop_gradient)
        if kind is not None and isinstance(init, NUMBERS) and isinstance(final, Out):
            # a Python number that a step turns into a wider Tensor starts as that wider type
            wide = number_dtype(init, final.dtype)
            if wide == final.dtype and final.shape == ():
                now = init
        unified = unify(now, final)
        if unified is None:
            raise self._refusal(f"variable {name!r}", shown(now), shown(final))
        ends = [x.stop_gradient for x in (now, final) if isinstance(x, Out)]
        if kind is not None:
            ends.append(kind.stop_gradient)
        self.carried[key] = _Kind(*unified, stop_gradient=all(ends))

    def _refusal(self, name: str, before: str, after: str) -> CaptureError:
        return refuse(
            self.line, self.what, name, f"{before} before a step", f"{after} after it",
            "keep shape, dtype and structure the same from step to step",
        )  # fmt: skip

    # the kernel

    def _apply(self, check: Region, step: Region) -> list[TensorState]:
        if not isinstance(check.values[0][1][0], Out):
            raise CaptureError(
                f"{self.line}: the test of {self.what} no longer depends on a Tensor after its first step"
            )
        inputs = Inputs([check, step])
        check_consts, step_consts = inputs.consts(check), inputs.consts(step)
        tested = check.values[0][1][0].index
        fetch = [self._final(step, at) for at in self.carried] + [("out", step.written[k].out) for k in self.state]
        dtypes_of = [a.dtype for a in self._avals()]
        starts = [self._initial(at, kind) for at, kind in self.carried.items()]
        starts += [(state.read(t), tape.edge_of(t)) for t in self.state.values()]
        count = len(inputs.arrays)

        def fn(*arrays: Any) -> tuple:
            consts, carry = arrays[:count], tuple(arrays[count:])
            c_check, c_step = [consts[c] for c in check_consts], [consts[c] for c in step_consts]

            def test(carry: tuple) -> Any:
                return evaluate(check, c_check, *carry)[tested]

            def body(carry: tuple) -> tuple:
                outs = evaluate(step, c_step, *carry)
                return tuple(
                    outs[v].astype(d) if how == "out" else jnp.asarray(v, d)
                    for (how, v), d in zip(fetch, dtypes_of, strict=True)
                )

            return (
                _bounded_loop(test, body, carry, self.maximum) if self.maximum is not None else _free(test, body, carry)
            )

        if self.maximum is None:
            fn = _without_gradient(fn, self._no_gradient())
        arrays = (*inputs.arrays, *(a for a, _ in starts))
        edges = (*inputs.edges, *(e for _, e in starts))
        # a loop may hand on a Tensor that wants gradients, under no_grad() too
        wanted = any(not k.stop_gradient for k in self.carried.values()) or any(e.live for e in step.written.values())
        if wanted and self.maximum is None and isinstance(capture := state.watch.active, Capture):
            while capture.outer is not None:
                capture = capture.outer
            capture.without_gradient = self._no_gradient()
        with tape.GradEnabled(wanted):
            results = tape.apply(Kernel(fn, "while_loop", saves=True), arrays, edges)
        for kind, result in zip(self.carried.values(), results, strict=False):
            if kind.stop_gradient and not result.stop_gradient:
                result.stop_gradient, result._node = True, None
        return results

    def _initial(self, at: tuple[int, int], kind: _Kind) -> tuple[Any, Any]:
        leaf = self.leaves[at[0]][at[1]]
        if isinstance(leaf, TensorState):
            return state.read(leaf).astype(kind.dtype), tape.edge_of(leaf)
        return jnp.asarray(leaf, kind.dtype), None

    @staticmethod
    def _final(step: Region, at: tuple[int, int]) -> tuple[str, Any]:
        leaf = step.values[at[0]][1][at[1]]
        return ("out", leaf.index) if isinstance(leaf, Out) else ("number", leaf)

    def _no_gradient(self) -> str:
        return (
            f"{self.line}: no gradient flows through {self.what}, because its number of steps depends on a "
            "Tensor; run it "
            "under no_grad(), give it a Python number of steps (for ... in range(n)), or call "
            "while_loop(..., maximum_iterations=n)"
        )


def _first_inside(name: str, what: str, line: str) -> OneSided:
    return OneSided(
        name,
        f"variable {name!r} is first defined inside {what} at {line}, whose number of steps depends on a "
        "Tensor; give it a value before, of the same shape and dtype",
    )


def _test_changes(line: str, what: str, changed: str) -> CaptureError:
    return CaptureError(f"{line}: the test of {what} changes {changed}; do that in its body")


def _changed(init: Any, final: Any) -> bool:
    if isinstance(final, Out):
        return final.tensor is not init
    return not (final is init or (type(final) is type(init) and isinstance(init, (*NUMBERS, str)) and final == init))


def _outside(leaf: Any) -> Any:
    if isinstance(leaf, TensorState):
        array = state.read(leaf)
        return Out(0, leaf, array.shape, np.dtype(array.dtype), leaf.stop_gradient)
    return leaf


def _free(test: Callable, body: Callable, carry: tuple) -> tuple:
    return jax.lax.while_loop(test, body, carry)


def _bounded_loop(test: Callable, body: Callable, carry: tuple, maximum: int) -> tuple:
    def step(carry: tuple, _: None) -> tuple:
        return jax.lax.cond(test(carry), body, lambda c: c, carry), None

    return jax.lax.scan(step, carry, None, length=maximum)[0]


def _without_gradient(fn: Callable, message: str) -> Callable:
    """fn, whose backward raises when it is asked for, not before."""
    guarded = jax.custom_vjp(fn)

    def backward(*_: Any) -> Any:
        raise HostValueError(message)

    guarded.defvjp(lambda *arrays: (fn(*arrays), None), backward)

    def call(*arrays: Any) -> tuple:
        return guarded(*arrays)

    return call
