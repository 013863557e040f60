"""print, assert and raise of captured code: what has to wait for values happens when the program runs, on the host.

Each becomes a jax.debug.callback. A failed assertion or a raise cannot stop a program halfway: it is
remembered, and raised when the call that ran the program ends.
"""

from __future__ import annotations

import builtins
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from polyreme.call_site import user_line
from polyreme.core import layout, state
from polyreme.core.checked import checked, raise_late
from polyreme.core.state import TensorState
from polyreme.eager.tensor import print_options
from polyreme.errors import CaptureError
from polyreme.jit.branch import condition
from polyreme.jit.capture import staged
from polyreme.jit.structure import flatten, rebuild

_log = logging.getLogger("polyreme.jit")


class _Calls:
    """count: host calls put into programs so far; waiting: how many calls raise at their end what is found wrong until
    then, which is in failures; is_on: False leaves host calls out; ordered: whether they keep the program's order,
    which jax can see to on one device only."""

    def __init__(self) -> None:
        self.count = self.waiting = 0
        self.failures: list[BaseException] = []
        self.is_on = self.ordered = True


calls: _Calls = _Calls()


@contextmanager
def left_out() -> Iterator[None]:
    """Inside the block captured code neither prints nor checks: for a program that has to run without this process."""
    outer, calls.is_on = calls.is_on, False
    try:
        yield
    finally:
        calls.is_on = outer


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
    ended = False
    try:
        yield
        jax.effects_barrier()
        ended = True
    finally:
        calls.waiting -= 1
        if not ended:
            calls.failures.clear()
            checked.late.clear()
    raise_late(calls.failures)


def fail(error: BaseException) -> None:
    """A program found something wrong: raised when the call that ran it ends."""
    if calls.waiting:
        calls.failures.append(error)
    else:  # one of a pipeline's programs: the schedule goes on
        _log.error("%s: %s", type(error).__name__, error)


def at_run_time(fn: Callable[..., None], *arrays: Any, ordered: bool = True) -> None:
    """Call fn with the values of arrays when the program that is being captured runs; in its order, if jax can."""
    if not calls.is_on:
        return
    calls.count += 1
    jax.debug.callback(fn, *arrays, ordered=ordered and calls.ordered and layout.active.layout is None)


checked.at_run_time = functools.partial(at_run_time, ordered=False)


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

    def of(self, value: np.ndarray) -> _Shown:
        """The same Tensor with its value."""
        shown = object.__new__(_Shown)
        shown.__dict__.update(self.__dict__, value=value)
        return shown

    def __format__(self, spec: str) -> str:
        return format(self.value.item() if spec and self.value.size == 1 else repr(self), spec)

    def __float__(self) -> float:
        return float(self.value.item())

    def __int__(self) -> int:
        return int(self.value.item())


@dataclass(frozen=True)
class _Piece:
    """Part of a text: write(value), where value has Tensors of unknown value inside."""

    write: Callable[[Any], str]
    value: Any


class Text:
    """A text with Tensors in it whose values are not known yet: good for print and for the message of assert.

    parts: str or _Piece.
    """

    parts: tuple[Any, ...]

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = tuple(parts)

    def _read(self) -> str:
        raise CaptureError(
            f"{user_line()}: this text holds the value of a Tensor, which is not known while the function is captured; "
            "print it, use it as the message of an assert, or return the Tensor and format it outside"
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


_VALUE = object()


class _Later:
    """Objects with Tensors of unknown value inside, to be put together when the values are there."""

    def __init__(self, value: Any, tensors: list[TensorState] | None = None) -> None:
        leaves: list[Any] = []
        self.spec = flatten(value, leaves)
        self.tensors: list[TensorState] = [] if tensors is None else tensors
        self.leaves = [self._strip(leaf) for leaf in leaves]
        # what a value is shown with must not keep the Tensor, which is gone when the program runs
        self.facts = [_Shown(t, np.empty(0)) for t in self.tensors]

    def _strip(self, leaf: Any) -> Any:
        if isinstance(leaf, Text):
            return Text(
                [p if isinstance(p, str) else _Piece(p.write, _Later(p.value, self.tensors)) for p in leaf.parts]
            )
        if not staged(leaf):
            return leaf
        self.tensors.append(leaf)
        return _VALUE

    def arrays(self) -> list[Any]:
        return [jax.lax.stop_gradient(state.read(t)) for t in self.tensors]

    def with_values(self, arrays: Sequence[Any]) -> Any:
        """The objects, with values."""
        return self._filled(iter([facts.of(np.asarray(a)) for facts, a in zip(self.facts, arrays, strict=True)]))

    def _filled(self, values: Iterator[Any]) -> Any:
        return rebuild(self.spec, iter([self._leaf(leaf, values) for leaf in self.leaves]))

    @staticmethod
    def _leaf(leaf: Any, values: Iterator[Any]) -> Any:
        if isinstance(leaf, Text):
            return "".join(p if isinstance(p, str) else p.write(p.value._filled(values)) for p in leaf.parts)
        return next(values) if leaf is _VALUE else leaf


def _text(write: Callable[[Any], str], value: Any) -> Any:
    """write(value), now if all that is in value is known."""
    leaves: list[Any] = []
    flatten(value, leaves)
    return Text([_Piece(write, value)]) if any(map(staged, leaves)) else write(value)


# operators of converted code


def text(parts: Sequence[Any]) -> Any:
    """An f-string: str, or Text if a Tensor without value is in it. parts: str or (value, conversion, spec)."""
    made: Any = ""
    for part in parts:
        made += part if isinstance(part, str) else _format(*part)
    return made


_CONVERSIONS: dict[str, Callable[[Any], str]] = {"r": repr, "s": str, "a": ascii}


def _format(value: Any, conversion: str, spec: str) -> Any:
    if isinstance(value, Text) and conversion in ("", "s") and not spec:
        return value
    convert = _CONVERSIONS.get(conversion)
    return _text(lambda v: format(v if convert is None else convert(v), spec), value)


def percent(template: str, values: Any) -> Any:
    """template % values."""
    return _text(lambda v: template % v, values)


def format_by(template: str) -> Callable[..., Any]:
    """template.format."""
    return lambda *args, **kwargs: _text(lambda v: template.format(*v[0], **v[1]), (args, kwargs))


def str_(*args: Any) -> Any:
    """str(value)."""
    return _text(str, *args) if len(args) == 1 and not isinstance(args[0], Text) else str(*args)


def repr_(value: Any) -> Any:
    """repr(value)."""
    return _text(repr, value)


def print_of(fn: Any) -> Any:
    """The function to call in place of fn, which converted code calls: another one for `print`."""
    return _print if fn is builtins.print else fn


def _print(*args: Any, **options: Any) -> None:
    """print(), when the program runs; at once outside of a capture."""
    if not state.capturing() or state.recording():
        builtins.print(*args, **options)  # noqa: T201  (the user's print)
        return
    later = _Later(args)

    def printed(*arrays: Any) -> None:
        builtins.print(*later.with_values(arrays), **options)  # noqa: T201  (the user's print)

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
            said = later.with_values(arrays)
            words = "" if message is None else f"{said}\n"
            fail(AssertionError(f"{words}assert {source} failed at {line}"))

    at_run_time(checked, state.read(condition(test)), *later.arrays())


@dataclass(frozen=True)
class _Origin:
    """The place of a raise statement, and whether an except clause of the same function may catch it."""

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
            fail(error)

    at_run_time(checked, state.read(condition(pred)))


def caught() -> BaseException | None:
    """The exception being handled."""
    return sys.exc_info()[1]
