"""print, assert and raise of captured code: what has to wait for values happens when the program runs, on the host.

Floor: 3.  Each becomes a jax.debug.callback. A failed assertion or a raise cannot stop a program halfway: it is
remembered, and raised when the call that ran the program ends.
"""

from __future__ import annotations

import builtins
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from polyreme.core import layout, state
from polyreme.core.state import TensorState
from polyreme.eager.tensor import print_options
from polyreme.errors import CaptureError
from polyreme.jit.branch import condition
from polyreme.jit.capture import staged, user_line
from polyreme.jit.structure import flatten, rebuild

_log = logging.getLogger("polyreme.jit")


class _Calls:
    """count: host calls put into programs so far; waiting: how many calls raise at their end what is found wrong until
    then, which is in failures; on: False leaves host calls out; ordered: whether they keep the program's order, which
    jax can see to on one device only."""

    def __init__(self) -> None:
        self.count = self.waiting = 0
        self.failures: list[BaseException] = []
        self.on = self.ordered = True


calls = _Calls()


@contextmanager
def left_out() -> Iterator[None]:
    """Inside the block captured code neither prints nor checks: for a program that has to run without this process."""
    outer, calls.on = calls.on, False
    try:
        yield
    finally:
        calls.on = outer


@contextmanager
def in_order(ordered: bool) -> Iterator[None]:
    """Inside the block the host calls of a program are ordered, or are not."""
    outer, calls.ordered = calls.ordered, ordered
    try:
        yield
    finally:
        calls.ordered = outer


@contextmanager
def awaited() -> Iterator[None]:
    """A block at whose end the programs started in it have printed and checked; raises the first thing found wrong."""
    calls.waiting += 1
    try:
        yield
        jax.effects_barrier()
    finally:
        calls.waiting -= 1
        found = list(calls.failures)
        calls.failures.clear()
    if found:
        raise found[0]


def _fail(error: BaseException) -> None:
    """A program found something wrong."""
    if calls.waiting:
        calls.failures.append(error)
    else:  # one of a pipeline's programs: the schedule goes on
        _log.error("%s: %s", type(error).__name__, error)


def at_run_time(fn: Callable[..., None], *arrays: Any) -> None:
    """Call fn with the values of arrays when the program that is being captured runs."""
    if not calls.on:
        return
    calls.count += 1
    jax.debug.callback(fn, *arrays, ordered=calls.ordered and layout.active.layout is None)


class _Shown:
    """A Tensor's value on the host, that prints as the Tensor does."""

    def __init__(self, tensor: Any, value: np.ndarray) -> None:
        self.dtype, self.place, self.stop_gradient = tensor.dtype.name, tensor.place, tensor.stop_gradient
        self.value = value

    def __repr__(self) -> str:
        with np.printoptions(**print_options):
            text = np.array2string(self.value, separator=", ").replace("\n", "\n" + " " * 7)
        facts = f"shape={list(self.value.shape)}, dtype={self.dtype}, place={self.place}"
        return f"Tensor({facts}, stop_gradient={self.stop_gradient},\n       {text})"

    def __format__(self, spec: str) -> str:
        return format(self.value.item() if spec and self.value.size == 1 else repr(self), spec)


class Text:
    """An f-string with Tensors in it whose values are not known yet: good for print and for the message of assert."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = tuple(parts)

    def _read(self) -> str:
        raise CaptureError(
            f"{user_line()}: this f-string holds the value of a Tensor, which is not known while the function is "
            "captured; print it, use it as the message of an assert, or return the Tensor and format it outside"
        )

    def __str__(self) -> str:
        return self._read()

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return self._read()

    def __hash__(self) -> int:
        self._read()
        return 0

    def __eq__(self, other: object) -> bool:
        return bool(self._read())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._read()

    def __add__(self, other: Any) -> Text:
        return Text((*self.parts, *_parts(other)))

    def __radd__(self, other: Any) -> Text:
        return Text((*_parts(other), *self.parts))


def _parts(value: Any) -> tuple[Any, ...]:
    return value.parts if isinstance(value, Text) else (value,)


def _written(parts: Sequence[Any], values: Iterator[Any]) -> str:
    """The text, each Tensor replaced by the next value."""
    return "".join(
        part if isinstance(part, str) else _formatted(next(values) if part[0] is _VALUE else part[0], *part[1:])
        for part in parts
    )


def _formatted(value: Any, how: str, spec: str) -> str:
    match how:
        case "r":
            value = repr(value)
        case "s":
            value = str(value)
        case "a":
            value = ascii(value)
    return format(value, spec)


_VALUE = object()


class _Later:
    """Objects with Tensors of unknown value inside, to be put together when the values are there."""

    def __init__(self, value: Any) -> None:
        leaves: list[Any] = []
        self.spec = flatten(value, leaves)
        self.tensors: list[TensorState] = []
        self.leaves = [self._kept(leaf) for leaf in leaves]
        # what a value is shown with must not keep the Tensor, which is gone when the program runs
        self.facts = [_Shown(t, np.empty(0)) for t in self.tensors]

    def _kept(self, leaf: Any) -> Any:
        if isinstance(leaf, Text):
            return Text([self._part(part) for part in leaf.parts])
        return self._part((leaf,))[0]

    def _part(self, part: Any) -> Any:
        if isinstance(part, str) or not staged(part[0]):
            return part
        self.tensors.append(part[0])
        return (_VALUE, *part[1:])

    def arrays(self) -> list[Any]:
        return [jax.lax.stop_gradient(state.read(t)) for t in self.tensors]

    def made(self, arrays: Sequence[Any]) -> Any:
        """The objects, with values."""
        values = iter([self._shown(facts, np.asarray(a)) for facts, a in zip(self.facts, arrays, strict=True)])
        return rebuild(self.spec, iter([self._leaf(leaf, values) for leaf in self.leaves]))

    @staticmethod
    def _shown(facts: _Shown, value: np.ndarray) -> _Shown:
        shown = object.__new__(_Shown)
        shown.__dict__.update(facts.__dict__, value=value)
        return shown

    @staticmethod
    def _leaf(leaf: Any, values: Iterator[Any]) -> Any:
        if isinstance(leaf, Text):
            return _written(leaf.parts, values)
        return next(values) if leaf is _VALUE else leaf


# operators of converted code


def text(parts: Sequence[Any]) -> Any:
    """An f-string: str, or Text if a Tensor without value is among its parts, each a str or (value, conversion,
    spec)."""
    flat: list[Any] = []
    for part in parts:
        flat += part[0].parts if isinstance(part, tuple) and isinstance(part[0], Text) else (part,)
    if any(isinstance(part, tuple) and staged(part[0]) for part in flat):
        return Text(flat)
    return _written(flat, iter(()))


def print_of(fn: Any) -> Any:
    """What `print` is to do here."""
    return _print if fn is builtins.print else fn


def _print(*args: Any, **options: Any) -> None:
    """print(), when the program runs; at once outside of a capture."""
    if not state.capturing() or state.recording():
        builtins.print(*args, **options)  # noqa: T201  (the user's print)
        return
    later = _Later(args)

    def printed(*arrays: Any) -> None:
        builtins.print(*later.made(arrays), **options)  # noqa: T201  (the user's print)

    at_run_time(printed, *later.arrays())


def check(test: Any, message: Callable[[], Any] | None, source: str) -> None:
    """assert test, message(). source: the test as written."""
    if not staged(test):
        if not test:
            raise AssertionError(*(() if message is None else (message(),)))
        return
    line = user_line()
    if state.recording():
        raise CaptureError(f"{line}: a Program cannot check an assert on a Variable; use static.nn.py_func")
    later = _Later(None if message is None else message())

    def checked(holds: Any, *arrays: Any) -> None:
        if not holds:
            said = later.made(arrays)
            words = "" if message is None else f"{said}\n"
            _fail(AssertionError(f"{words}assert {source} failed at {line}"))

    at_run_time(checked, state.read(condition(test)), *later.arrays())


@dataclass(frozen=True)
class _Origin:
    """Where a raise statement is, and whether an except clause of the same function may catch it."""

    line: str
    in_try: bool


_ORIGIN = "polyreme_origin"


def raised(error: Any, in_try: bool) -> Any:
    """The exception of a raise statement, marked as one."""
    made = error() if isinstance(error, type) else error
    if state.capturing() and isinstance(made, Exception):
        setattr(made, _ORIGIN, _Origin(user_line(), in_try))
    return made


def is_explicit(error: Exception) -> bool:
    """Whether a raise statement of converted code raised this."""
    return hasattr(error, _ORIGIN)


def raise_if(pred: TensorState, error: Exception) -> None:
    """Raise error when the program has run, if pred is true in it."""
    origin: _Origin = getattr(error, _ORIGIN)
    if state.recording():
        raise CaptureError(
            f"{origin.line}: whether this {type(error).__name__} is raised depends on a Variable; a Program "
            "cannot raise"
        ) from None
    if origin.in_try:
        raise CaptureError(
            f"{origin.line}: whether this {type(error).__name__} is raised depends on a Tensor, and the try around it "
            "would catch it; write an if with both cases instead"
        ) from None
    error.add_note(f"raised at {origin.line}, in captured code")
    error.__traceback__ = None

    def checked(fails: Any) -> None:
        if fails:
            _fail(error)

    at_run_time(checked, state.read(condition(pred)))


def caught() -> BaseException | None:
    """The exception being handled."""
    return sys.exc_info()[1]
