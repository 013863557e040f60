"""What a row of the contract table is, and the checks that every row passes.

A row says how to call one public function and what NumPy gives for the same call. From it follow: eager equals NumPy,
captured equals eager, gradient equals finite differences, dtype under autocast, and the documented error on bad input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import pytest

from polyreme.core import amp_policy, rng
from polyreme.core import dtype as dtypes
from polyreme.core.op import OPS
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.jit import to_static


@dataclass(frozen=True)
class Case:
    """One row: a call of a public op and its oracle.

    make: rng -> positional arguments; ndarrays become Tensors, the rest are attributes. ref: the same arguments -> what
    NumPy or SciPy gives (array, or tuple/list of arrays; None only with ref_note saying why there is no oracle and what
    `check` asserts instead). terms: how many rounded terms one output element sums. no_grad: why no gradient is tested.
    bad: (arguments, error class, match). low: the row is run under autocast too and the output has this dtype.
    """

    name: str
    make: Callable[[np.random.Generator], tuple]
    ref: Callable[..., Any] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    terms: int = 8
    no_grad: str = ""
    bad: tuple[tuple, type[Exception], str] | None = None
    check: Callable[..., None] | None = None
    amp_out: str = ""  # dtype of the result under autocast where it is not that of the op's class
    host: str = ""  # why the function needs the value on the host and so cannot be captured
    tag: str = ""

    @property
    def id(self) -> str:
        return f"{self.name}-{self.tag}" if self.tag else self.name

    @property
    def fn(self) -> Callable[..., Any]:
        return OPS[self.name]

    def call(self, args: Any) -> Any:
        """The row's function on these positional arguments and the row's keywords."""
        return self.fn(*args, **tensors_in(self.kwargs))

    def arguments(self) -> tuple:
        # one seed a name, so that a row's data does not depend on the other rows
        return self.make(np.random.default_rng(sum(self.id.encode())))


def tensors(value: Any, *, wants_grad: bool = False) -> Any:
    """Arguments with every ndarray as a Tensor; not by to_tensor, which compiles a copy for each new shape."""
    if isinstance(value, np.ndarray):
        return Tensor(jax.device_put(value.copy()), stop_gradient=not (wants_grad and dtypes.is_inexact(value.dtype)))
    if isinstance(value, (list, tuple)):
        return type(value)(tensors(v, wants_grad=wants_grad) for v in value)
    return value


def arrays(value: Any) -> list[np.ndarray]:
    """Every Tensor or array in a result, in order."""
    if isinstance(value, Tensor):
        return [value.numpy()]
    if isinstance(value, (list, tuple)):
        return [a for v in value for a in arrays(v)]
    return [] if value is None else [np.asarray(value)]


def flat(value: Any) -> list[Tensor]:
    """Every Tensor in arguments or a result, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in flat(v)]
    return []


def tolerance(dtype: np.dtype, terms: int) -> float:
    """Relative error of a sum of `terms` values each rounded to dtype, with a factor 4 for the functions inside."""
    return 0.0 if not dtypes.is_inexact(dtype) else 4 * terms * float(_eps(dtype))


def _eps(dtype: np.dtype) -> float:
    import ml_dtypes  # noqa: PLC0415

    return float(ml_dtypes.finfo(dtype).eps) if dtypes.is_floating(dtype) else float(np.finfo(dtype).eps)


def assert_close(got: list[np.ndarray], want: list[np.ndarray], terms: int) -> None:
    """Same number of arrays, same shapes, values within the computed tolerance."""
    assert len(got) == len(want), f"{len(got)} outputs, oracle has {len(want)}"
    for g, w in zip(got, want, strict=True):
        w = np.asarray(w)
        assert g.shape == w.shape, f"shape {g.shape}, oracle has {w.shape}"
        if not dtypes.is_inexact(g.dtype):
            np.testing.assert_array_equal(g, w)
            continue
        bound = tolerance(g.dtype, terms)
        finite = np.abs(w[np.isfinite(w)])
        scale = float(finite.max()) if finite.size else 1.0
        np.testing.assert_allclose(
            g.astype(w.dtype) if w.dtype.kind in "fc" else g, w, rtol=bound, atol=bound * max(scale, 1e-3)
        )


def check_row(case: Case, *, whole: bool) -> None:
    """What every row states: eager equals NumPy, in no wider dtype; the gradient equals finite differences; bad input
    raises.

    whole: also what hardly depends on attributes, captured equals eager and the dtype under autocast. One test, so that
    the checks share the row's compiled kernels, which are nearly all of its time.
    """
    rng.seed(7)
    args = case.arguments()
    result = case.call(tensors(args))
    eager = arrays(result)
    check_eager(case, eager)
    if not any(_is_double(leaf) for leaf in _leaves((*args, *case.kwargs.values()))):
        assert not any(_is_double(t.dtype) for t in flat(result)), f"float64 of narrower inputs: {flat(result)}"
    if whole:
        check_modes(case, eager)
    if not case.no_grad:
        check_gradient(case)
    if case.bad:
        check_bad(case)


_DOUBLE = {np.dtype("float64"), np.dtype("complex128")}


def _is_double(value: Any) -> bool:
    """Whether an argument is, or asks for, float64 or complex128."""
    kind = getattr(value, "dtype", value)
    return (
        kind in ("float64", "complex128") if isinstance(kind, str) else isinstance(kind, np.dtype) and kind in _DOUBLE
    )


def _leaves(value: Any) -> list[Any]:
    return [leaf for v in value for leaf in _leaves(v)] if isinstance(value, (list, tuple)) else [value]


def check_modes(case: Case, eager: list[np.ndarray]) -> None:
    """Captured equals eager, the result from seed 7; the dtypes of the result under autocast."""
    if not case.host:
        check_captured(case, eager)
    if hasattr(case.fn, "op"):
        check_autocast(case, eager)


def check_eager(case: Case, eager: list[np.ndarray]) -> None:
    """The result against NumPy's, and what the row's own check says of it."""
    if case.check is not None:
        case.check(*eager)
    if case.ref is not None:
        want = case.ref(*case.arguments(), **case.kwargs)
        assert_close(eager, list(want) if isinstance(want, (tuple, list)) else [want], case.terms)
    assert case.ref is not None or case.check is not None, "a row needs an oracle or a check"


def check_captured(case: Case, eager: list[np.ndarray]) -> None:
    """The call inside a captured function gives what it gives eagerly; random ops start from the same seed."""
    rng.seed(7)
    captured = arrays(to_static(case.call)(tensors(case.arguments())))
    # the captured program may fuse what eager runs op by op, and round between other terms
    assert_close(captured, eager, case.terms)


def check_bad(case: Case) -> None:
    """The documented error on bad input."""
    assert case.bad is not None
    args, error, match = case.bad
    with pytest.raises(error, match=match):
        arrays(case.call(tensors(args)))


def tensors_in(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: tensors(v) for k, v in kwargs.items()}


def _widen(value: Any) -> Any:
    if isinstance(value, np.ndarray) and dtypes.is_inexact(value.dtype):
        return value.astype(np.complex128 if np.iscomplexobj(value) else np.float64)
    if isinstance(value, (list, tuple)):
        return type(value)(_widen(v) for v in value)
    return value


def check_gradient(case: Case) -> None:
    """Directional derivative of the tape against central differences in float64, one direction an input.

    What is differentiated is the sum of all outputs times fixed weights: the tape is handed the weights as cotangents,
    and NumPy sums the shifted outputs, so that nothing but the call and its backward is compiled.
    """
    args = _widen(case.arguments())
    taped = tensors(args, wants_grad=True)
    outs = _inexact(case.call(taped))
    assert outs, "no floating output: say no_grad"
    generator = np.random.default_rng(1)
    # complex ones, so that the real part of the sum depends on the imaginary parts of the outputs too
    weights = [generator.uniform(0.5, 1.5, t.shape) * (1 - 0.7j if dtypes.is_complex(t.dtype) else 1) for t in outs]
    roots = [(out, weight) for out, weight in zip(outs, weights, strict=True) if not out.stop_gradient]
    assert roots, "nothing was taped"
    inputs = [t for t in flat(taped) if not t.stop_gradient]
    grads = tape.grad(
        [out for out, _ in roots],
        inputs,
        # of sum(out * weight), in the convention dL/dx + i dL/dy
        tensors([np.asarray(np.conj(weight), out.numpy().dtype) for out, weight in roots]),
        retain_graph=False,
        create_graph=False,
        allow_unused=True,
        no_grad_vars=[],
    )
    leaves = _inexact_leaves(args)
    assert len(leaves) == len(inputs)
    step = 1e-5
    for index, (leaf, got) in enumerate(zip(leaves, grads, strict=True)):
        direction = np.random.default_rng(index + 2).uniform(0.5, 1.5, leaf.shape)
        if np.iscomplexobj(leaf):
            direction = direction * (1 + 0.5j)
        value = []
        for sign in (1, -1):
            shifted = _inexact(case.call(tensors(_shifted(args, index, sign * step * direction))))
            value.append(complex(sum(np.sum(t.numpy() * w) for t, w in zip(shifted, weights, strict=True))))
        numeric = ((value[0] - value[1]) / (2 * step)).real
        analytic = 0.0 if got is None else float(np.sum(np.conj(got.numpy()) * direction).real)
        # central differences: error step^2 * third derivative, plus rounding eps * |f| / step
        bound = 1e-5 * max(1.0, abs(numeric)) + 1e-15 * max(abs(v) for v in value) * case.terms / step
        assert abs(numeric - analytic) <= bound, (
            f"input {index}: finite differences {numeric}, tape {analytic}, bound {bound}"
        )


def _inexact(result: Any) -> list[Tensor]:
    return [t for t in flat(result) if dtypes.is_inexact(t.dtype)]


def _inexact_leaves(value: Any) -> list[np.ndarray]:
    if isinstance(value, np.ndarray):
        return [value] if dtypes.is_inexact(value.dtype) else []
    if isinstance(value, (list, tuple)):
        return [a for v in value for a in _inexact_leaves(v)]
    return []


def _shifted(args: Any, at: int, delta: np.ndarray) -> Any:
    """args with delta added to the at-th inexact array."""
    counter = iter(range(10**6))

    def walk(value: Any) -> Any:
        if isinstance(value, np.ndarray) and dtypes.is_inexact(value.dtype):
            return value + delta if next(counter) == at else value
        if isinstance(value, (list, tuple)):
            return type(value)(walk(v) for v in value)
        return value

    return walk(args)


def check_autocast(case: Case, eager: list[np.ndarray]) -> None:
    """Under bfloat16 autocast class "low" gives bfloat16, class "fp32" float32; "widest" keeps the widest."""
    op = case.fn.op
    args = tensors(case.arguments())

    def call() -> list[Any]:
        return [t._array for t in flat(case.call(args))]

    amp_policy.active.policy = amp_policy.Policy(low=dtypes.bfloat16)
    try:
        # dtypes alone, so that nothing is compiled
        cast = [a.dtype for a in (call() if case.host else jax.eval_shape(call))]
    finally:
        amp_policy.active.policy = None
        # tracing has left its own value in the generator
        rng.seed(7)
    for before, after in zip([a.dtype for a in eager], cast, strict=True):
        if before != dtypes.float32:
            assert after == before
        elif case.amp_out:
            assert after == case.amp_out
        elif op.amp == "low":
            assert after == dtypes.bfloat16, f"amp='low' but the output is {after}"
        else:
            assert after == dtypes.float32
