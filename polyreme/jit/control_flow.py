"""Control flow on Tensors: cond, while_loop, case and switch_case, and the operators converted Python code calls.

Eagerly a condition has a value and plain Python runs. While capturing it has none: both branches are traced
into one kernel (jit.branch), a loop into one (jit.loop). A condition that is a Python value always stays Python.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from malt.operators import Undefined

from polyreme.call_site import user_line
from polyreme.core import state
from polyreme.core.state import TensorState
from polyreme.errors import CaptureError, ConfigError, ShapeError
from polyreme.jit import host_calls
from polyreme.jit.branch import branch, condition, negation
from polyreme.jit.capture import staged
from polyreme.jit.loop import loop
from polyreme.ops import arithmetic as ar
from polyreme.ops.indices.gather import where

_log = logging.getLogger("polyreme.jit")
# a loop over this many rows is unrolled into so much code that compiling it takes minutes
_LONG_UNROLL = 256
_MAX_UNROLL = 10_000


# functional forms


def cond(pred: Any, true_fn: Callable[[], Any] | None = None, false_fn: Callable[[], Any] | None = None,
         name: str | None = None, return_names: Sequence[str] | None = None) -> Any:  # fmt: skip
    """true_fn() if pred else false_fn(). A missing function returns None.

    Captured with a Tensor pred, both are traced and must return the same structure, shapes and dtypes; gradients flow
    through the one that is taken.

    >>> from polyreme.eager.tensor import to_tensor
    >>> cond(to_tensor(2.0) > 1.0, lambda: "above", lambda: "below")
    'above'
    """
    for fn, what in ((true_fn, "true_fn"), (false_fn, "false_fn")):
        if fn is not None and not callable(fn):
            raise TypeError(f"cond: {what} must be callable, got {type(fn).__name__}")
    runs = tuple((lambda: None) if f is None else f for f in (true_fn, false_fn))
    if (recorder := state.recorder()) is not None and staged(pred):
        return recorder.cond(pred, *runs)
    if not staged(pred):
        return runs[0]() if pred else runs[1]()
    label = "the result of cond" if return_names is None else ", ".join(return_names)
    return branch(pred, (lambda: [runs[0]()], lambda: [runs[1]()]), [label], "cond()")[0]


def while_loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Sequence[Any],
    is_test: bool = False,
    name: str | None = None,
    maximum_iterations: int | None = None,
) -> list[Any]:
    """loop_vars = body(*loop_vars) while cond(*loop_vars), at most maximum_iterations times; returns the last.

    Captured with a Tensor condition, shapes, dtypes and structure stay the same from step to step. Gradients need
    maximum_iterations (that many steps are then always computed, and saved); without it backward() raises CaptureError.

    >>> from polyreme.eager.tensor import to_tensor
    >>> [i] = while_loop(lambda i: i < 10, lambda i: [i + 3], [to_tensor(0)])
    >>> i.item()
    12
    """
    if not isinstance(loop_vars, (list, tuple)) or not loop_vars:
        raise ConfigError(f"while_loop: loop_vars is a non-empty list or tuple, got {loop_vars!r}")
    if maximum_iterations is not None and (type(maximum_iterations) is not int or maximum_iterations < 0):
        raise ConfigError(f"while_loop: maximum_iterations is None or an int of at least 0, got {maximum_iterations!r}")
    now = list(loop_vars)
    if (recorder := state.recorder()) is not None:
        return recorder.while_loop(cond, body, now, maximum_iterations)
    steps = itertools.count() if maximum_iterations is None else range(maximum_iterations)
    for done in steps:
        go = cond(*now)
        if staged(go):
            left = None if maximum_iterations is None else maximum_iterations - done
            return _staged_while(cond, body, now, left)
        if not go:
            break
        now = _loop_result(body(*now), len(now))
    return now


def _staged_while(test: Callable, body: Callable, init: list[Any], maximum: int | None) -> list[Any]:
    carried = [list(init)]

    def put(values: Sequence[Any]) -> None:
        carried[0] = list(values)

    def step() -> None:
        carried[0] = _loop_result(body(*carried[0]), len(init))

    names = [f"loop_vars[{i}]" for i in range(len(init))]
    loop(lambda: test(*carried[0]), step, lambda: carried[0], put, names, "while_loop()", maximum)
    return carried[0]


def _loop_result(result: Any, count: int) -> list[Any]:
    values = list(result) if isinstance(result, (list, tuple)) else [result]
    if len(values) != count:
        raise ConfigError(f"while_loop: body returned {len(values)} values for {count} loop_vars")
    return values


def case(
    pred_fn_pairs: Sequence[tuple[Any, Callable[..., Any]]],
    default: Callable[..., Any] | None = None,
    name: str | None = None,
) -> Any:
    """The result of the first fn whose pred is true; else of default, which is the last fn if not given.

    >>> case([(False, lambda: 1), (True, lambda: 2)], default=lambda: 3)
    2
    """
    pairs = list(pred_fn_pairs)
    if not pairs or not all(isinstance(p, (list, tuple)) and len(p) == 2 and callable(p[1]) for p in pairs):
        raise ConfigError("case: pred_fn_pairs is a non-empty list of (pred, function)")
    if default is None:
        default = pairs.pop()[1]
    chosen = default
    for pred, fn in reversed(pairs):
        chosen = _either(pred, fn, chosen)
    return chosen()


def _either(pred: Any, fn: Callable, other: Callable) -> Callable:
    return lambda: cond(pred, fn, other)


def switch_case(
    branch_index: Any,
    branch_fns: Sequence[Any] | Mapping[int, Callable[..., Any]],
    default: Callable[..., Any] | None = None,
    name: str | None = None,
) -> Any:
    """The result of the function with this index; for any other, of default (if not given, of the largest index).

    branch_fns: a list of functions, of (index, function), or a dict.

    >>> switch_case(1, [lambda: "a", lambda: "b"])
    'b'
    """
    items = list(branch_fns.items()) if isinstance(branch_fns, Mapping) else list(branch_fns)
    pairs = [item if isinstance(item, (list, tuple)) else (i, item) for i, item in enumerate(items)]
    indices = [i for i, _ in pairs]
    if not pairs or len(set(indices)) != len(indices) or not all(type(i) is int and callable(f) for i, f in pairs):
        raise ConfigError(f"switch_case: branch_fns needs functions with distinct int indices, got indices {indices}")
    last = default if default is not None else max(pairs, key=lambda p: p[0])[1]
    return case([(branch_index == i, f) for i, f in pairs], default=last)


# operators of converted code: the names and parameters are those that the transpiler generates


def if_stmt(
    test: Any,
    body: Callable[..., Any],
    orelse: Callable[..., Any],
    get: Callable[..., Any],
    put: Callable[..., Any],
    names: tuple[str, ...],
    num_used: int,
) -> None:
    """if/elif/else."""
    test = _decided(test)
    if not staged(test):
        (body if test else orelse)()
        return
    _staged_if(test, (body, orelse), get, put, names, num_used, "an if")


def _decided(test: Any) -> Any:
    """test, or True or False where shapes decide it: the capture is made for them, and has that side alone. A size that
    an export leaves open decides nothing."""
    sizes = state.sizes_of(test) if staged(test) else None
    if sizes is None or sizes.size != 1:
        return test
    value = sizes.item()
    return bool(value) if type(value) in (bool, int, np.bool_) else test


def _staged_if(
    test: Any, sides: tuple[Callable, Callable], get: Callable, put: Callable, names: tuple, used: int, what: str
) -> None:
    init = get()
    raising: list[int] = []

    def run(index: int) -> Callable:
        def values() -> Sequence[Any]:
            put(init)
            try:
                sides[index]()
                return get()
            except Exception as error:
                if host_calls.is_explicit(error):
                    raising.append(index)
                raise
            finally:
                put(init)

        return values

    try:
        put(branch(test, (run(0), run(1)), names, what, used))
    except Exception as error:
        if not raising:
            raise
        _go_on_without(raising[-1], test, error, sides)


def _go_on_without(raising: int, test: Any, error: Exception, sides: tuple[Callable, Callable]) -> None:
    """One side of an if raises: so does the program when it has run, if it went there. The other side is all there is
    to go on with."""
    host_calls.raise_if(negation(test) if raising else test, error)
    try:
        sides[1 - raising]()
    except Exception as other:
        if not host_calls.is_explicit(other):
            raise
        raise CaptureError(
            f"{user_line()}: which of two exceptions is raised ({error!r} or {other!r}) depends on a Tensor; decide it "
            "outside of the captured function"
        ) from None


def if_exp(test: Any, if_true: Callable[..., Any], if_false: Callable[..., Any], text: str) -> Any:
    """a if test else b."""
    test = _decided(test)
    if not staged(test):
        return if_true() if test else if_false()
    names = [f"its value (`... if {text} else ...`)"]
    return branch(test, (lambda: [if_true()], lambda: [if_false()]), names, "a conditional expression")[0]


def while_stmt(
    test: Callable[..., Any],
    body: Callable[..., Any],
    get: Callable[..., Any],
    put: Callable[..., Any],
    names: tuple[str, ...],
    _: Any,
) -> None:
    """while: Python steps as long as the test is a Python value, then one staged loop."""
    while True:
        _forever.asked = False
        go = test()
        if staged(go):
            is_endless = _forever.asked
            loop(test, body, get, put, names, "a while loop")
            if is_endless:
                _left_by_return(get, put, names)
            return
        if not go:
            return
        body()


class _Forever:
    """asked: whether the test of the loop at hand is `while True`, but for the flags of break and return."""

    asked = False


_forever = _Forever()


def forever() -> bool:
    """The test of `while True`."""
    _forever.asked = True
    return True


def _left_by_return(get: Callable, put: Callable, names: tuple[str, ...]) -> None:
    """After `while True` without a break, the function has returned."""
    flags = [name for name in names if name.startswith(("do_return", "break_"))]
    if len(flags) == 1 and flags[0].startswith("do_return"):
        put(tuple(True if name == flags[0] else value for name, value in zip(names, get(), strict=True)))


def for_stmt(
    items: Any,
    more: Callable[..., Any] | None,
    body: Callable[..., Any],
    get: Callable[..., Any],
    put: Callable[..., Any],
    names: tuple[str, ...],
    _: Any,
) -> None:
    """for: unrolled when the number of steps is known; a staged loop over a TensorRange. more: False after a break."""
    if isinstance(items, TensorRange):
        _for_range(items, more, body, get, put, names)
        return
    if isinstance(items, TensorState) and len(items) > _LONG_UNROLL:  # type: ignore[arg-type]
        _log.warning(
            "%s: a for loop over the %d rows of a Tensor is unrolled, which compiles slowly; work on the whole "
            "Tensor, or use "
            "range(Tensor) or while_loop",
            user_line(),
            len(items),  # type: ignore[arg-type]
        )
    for count, item in enumerate(items):  # type: ignore[arg-type]
        go = True if more is None else more()
        if not staged(go):
            if not go:
                return
            body(item)
            continue
        if count == _MAX_UNROLL:
            raise CaptureError(
                f"{user_line()}: a for loop whose end depends on a Tensor was unrolled {_MAX_UNROLL} times; "
                "iterate over "
                "range(Tensor), or use while"
            )
        what = "a for loop that is left when a Tensor says so"
        _staged_if(go, (lambda item=item: body(item), _nothing), get, put, names, len(names), what)


def _nothing() -> None:
    """The missing else."""


class TensorRange:
    """range() with a Tensor among its arguments, while capturing."""

    start: Any
    stop: Any
    step: int

    def __init__(self, start: Any, stop: Any, step: Any) -> None:
        if not isinstance(step, int) or step == 0:
            raise CaptureError(
                f"{user_line()}: the step of range() over Tensors must be a Python int, not zero; got {step!r}"
            )
        self.start, self.stop, self.step = (int_scalar(start), int_scalar(stop), step)
        self.count_from: int | None = None

    def counted(self, start: int) -> TensorRange:
        """enumerate(self, start)."""
        made = TensorRange(self.start, self.stop, self.step)
        made.count_from = start
        return made

    def reversed(self) -> TensorRange:
        """The same numbers, last first."""
        sign = 1 if self.step > 0 else -1
        steps = (self.stop - self.start + self.step - sign) // self.step
        return TensorRange(self.start + (steps - 1) * self.step, self.start - sign, -self.step)

    def item(self, index: Any) -> Any:
        """The value of the loop's variable at an index of the range."""
        return index if self.count_from is None else ((index - self.start) // self.step + self.count_from, index)

    def _unknown(self) -> Any:
        raise CaptureError(
            f"{user_line()}: how many numbers this range() has depends on a Tensor; only a for statement can go "
            "through it, with enumerate() or reversed() around it or without"
        )

    __iter__ = __len__ = __bool__ = _unknown

    def __getitem__(self, at: Any) -> Any:
        return self._unknown()


def int_scalar(value: Any) -> Any:
    """value, which range() was given; ShapeError or TypeError if it is no integer."""
    if isinstance(value, TensorState):
        array = state.read(value)
        if array.size != 1 or array.dtype.kind not in "iu":
            raise ShapeError(
                f"{user_line()}: range() needs integers, got a Tensor of shape {list(array.shape)} dtype {array.dtype}"
            )
        return value.reshape([]) if array.shape else value  # type: ignore[attr-defined]
    return value.__index__()


def make_range(*args: Any) -> Any:
    """range(), or a TensorRange if an argument's value is not known."""
    if not any(staged(a) for a in args):
        return range(*args)
    start, stop, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
    return TensorRange(start, stop, step)


def _for_range(
    items: TensorRange, more: Callable | None, body: Callable, get: Callable, put: Callable, names: tuple[str, ...]
) -> None:
    counter = [items.start]

    def test() -> Any:
        inside = counter[0] < items.stop if items.step > 0 else counter[0] > items.stop
        return inside if more is None else and_(more, lambda: inside)

    def step() -> None:
        now = counter[0]
        body(items.item(now))
        counter[0] = now + items.step

    def get_all() -> tuple:
        return (counter[0], *get())

    def put_all(values: Sequence[Any]) -> None:
        counter[0] = values[0]
        put(tuple(values[1:]))

    loop(test, step, get_all, put_all, ("the loop's index", *names), "a for loop")


def and_(a: Callable[..., Any], b: Callable[..., Any]) -> Any:
    """a and b; both are evaluated if a is a Tensor of unknown value."""
    left = _decided(a())
    if not staged(left):
        return left and b()
    right = b()
    if isinstance(right, bool) or (isinstance(right, TensorState) and not _alike(left, right)):
        return ar.logical_and(condition(left), condition(right) if isinstance(right, TensorState) else right)
    return where(condition(left), *_pair(right, left))


def or_(a: Callable[..., Any], b: Callable[..., Any]) -> Any:
    """a or b; both are evaluated if a is a Tensor of unknown value."""
    left = _decided(a())
    if not staged(left):
        return left or b()
    right = b()
    if isinstance(right, bool) or (isinstance(right, TensorState) and not _alike(left, right)):
        return ar.logical_or(condition(left), condition(right) if isinstance(right, TensorState) else right)
    return where(condition(left), *_pair(left, right))


def _alike(a: Any, b: Any) -> bool:
    return (a._array.shape, a._array.dtype) == (b._array.shape, b._array.dtype)


def _pair(a: Any, b: Any) -> tuple[Any, Any]:
    for value in (a, b):
        if not isinstance(value, (TensorState, int, float)):
            raise CaptureError(
                f"{user_line()}: `and`/`or` of a Tensor and a {type(value).__name__}; only Tensors, bools and "
                "numbers can "
                "depend on a Tensor"
            )
    return a, b


def not_(a: Any) -> Any:
    """not a."""
    return negation(a) if staged(a) else not a


def ld(value: Any) -> Any:
    """A variable's value; raises what Python would, or says why it has none."""
    return value.read() if isinstance(value, Undefined) else value
