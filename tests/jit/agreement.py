"""What every case of Python in to_static must satisfy: the captured function agrees with its eager run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyreme.core.state import TensorState
from polyreme.eager.tensor import to_tensor
from polyreme.jit import to_static
from polyreme.jit.structure import flatten

# at most some ten float32 roundings, which a fused program may do in another order
RTOL = 10 * float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Case:
    """A function of one argument, and the values to run it on. gradient: no loop of unknown length is in it."""

    fn: Callable[..., Any]
    inputs: tuple[Any, ...]
    gradient: bool = True

    def __str__(self) -> str:
        return self.fn.__name__


CASES: list[Case] = []


def case(*inputs: Any, gradient: bool = True) -> Callable[[Callable], Callable]:
    """Put a function into the table."""

    def add(fn: Callable) -> Callable:
        CASES.append(Case(fn, inputs, gradient))
        return fn

    return add


def check(case: Case) -> None:
    """Values, and gradients by backward outside and inside of what is captured, equal those of the eager run.

    One program serves all inputs: nothing was decided by a value while capturing.
    """
    captured = to_static(case.fn)
    step = to_static(_with_backward(case.fn))
    for value in case.inputs:
        a, b, c = (to_tensor(value, stop_gradient=not case.gradient) for _ in range(3))
        want, got = case.fn(a), captured(b)
        _equal(got, want)
        if case.gradient:
            want.sum().backward()
            got.sum().backward()
            _equal(step(c), want)
            _equal([b.grad, c.grad], [a.grad, a.grad])
    assert captured.retraces == ["first call"]


def _with_backward(fn: Callable) -> Callable:
    def step(x: Any) -> Any:
        result = fn(x)
        result.sum().backward()
        return result

    return step


def _equal(got: Any, want: Any) -> None:
    mine, theirs = _leaves(got), _leaves(want)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=RTOL)


def _leaves(value: Any) -> list[Any]:
    leaves: list[Any] = []
    flatten(value, leaves)
    return [leaf.numpy() if isinstance(leaf, TensorState) else leaf for leaf in leaves]
