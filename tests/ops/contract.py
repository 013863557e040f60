"""What a row of the contract table is, and the checks that every row passes.

A row says how to call one public function and what NumPy gives for the same call. From it follow: eager equals NumPy,
captured equals eager, gradient equals finite differences, dtype under autocast, and the documented error on bad input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polyreme.core import amp_policy, rng
from polyreme.core import dtype as dtypes
from polyreme.core.op import OPS
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor, to_tensor
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

    def arguments(self) -> tuple:
        # one seed a name, so that a row's data does not depend on the other rows
        return self.make(np.random.default_rng(sum(self.id.encode())))


def tensors(value: Any, *, wants_grad: bool = False) -> Any:
    """Arguments with every ndarray as a Tensor."""
    if isinstance(value, np.ndarray):
        return to_tensor(value, stop_gradient=not (wants_grad and dtypes.is_inexact(value.dtype)))
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


def check_eager(case: Case) -> None:
    args = case.arguments()
    got = arrays(case.fn(*tensors(args), **tensors_in(case.kwargs)))
    if case.check is not None:
        case.check(*got)
    if case.ref is not None:
        want = case.ref(*args, **case.kwargs)
        assert_close(got, list(want) if isinstance(want, (tuple, list)) else [want], case.terms)
    assert case.ref is not None or case.check is not None, "a row needs an oracle or a check"


def check_captured(case: Case) -> None:
    """The call inside a captured function gives what it gives eagerly; random ops start from the same seed."""
    args = case.arguments()

    def call(given: Any) -> Any:
        return case.fn(*given, **tensors_in(case.kwargs))

    results = []
    for run in (call, to_static(call)):
        rng.seed(7)
        results.append(arrays(run(tensors(args))))
    # the captured program may fuse what eager runs op by op, and round between other terms
    assert_close(results[1], results[0], case.terms)


def tensors_in(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: tensors(v) for k, v in kwargs.items()}


def _widen(value: Any) -> Any:
    if isinstance(value, np.ndarray) and dtypes.is_inexact(value.dtype):
        return value.astype(np.complex128 if np.iscomplexobj(value) else np.float64)
    if isinstance(value, (list, tuple)):
        return type(value)(_widen(v) for v in value)
    return value


def _scalar(case: Case, args: tuple, weights: list[np.ndarray] | None) -> tuple[Any, list[np.ndarray]]:
    """sum of outputs times fixed random weights, as one number, so that one directional derivative tests all."""
    outs = [t for t in flat(case.fn(*args, **tensors_in(case.kwargs))) if dtypes.is_inexact(t.dtype)]
    if weights is None:
        rng = np.random.default_rng(1)
        # complex ones, so that the real part of the total depends on the imaginary parts of the outputs too
        weights = [rng.uniform(0.5, 1.5, t.shape) * (1 - 0.7j if dtypes.is_complex(t.dtype) else 1) for t in outs]
    total = None
    for out, weight in zip(outs, weights, strict=True):
        term = OPS["sum"](out * to_tensor(weight))
        total = term if total is None else total + term
    return total, weights


def check_gradient(case: Case) -> None:
    """Directional derivative of the tape against central differences in float64, one direction an input."""
    args = _widen(case.arguments())
    taped = tensors(args, wants_grad=True)
    total, weights = _scalar(case, taped, None)
    assert total is not None, "no floating output: say no_grad"
    assert not total.stop_gradient, "nothing was taped"
    inputs = [t for t in flat(taped) if not t.stop_gradient]
    grads = tape.grad(
        [total], inputs, [None], retain_graph=False, create_graph=False, allow_unused=True, no_grad_vars=[]
    )
    leaves = _inexact_leaves(args)
    assert len(leaves) == len(inputs)
    step = 1e-5
    for at, (leaf, got) in enumerate(zip(leaves, grads, strict=True)):
        direction = np.random.default_rng(at + 2).uniform(0.5, 1.5, leaf.shape)
        if np.iscomplexobj(leaf):
            direction = direction * (1 + 0.5j)
        value = [
            complex(np.asarray(_scalar(case, tensors(_shifted(args, at, sign * step * direction)), weights)[0].numpy()))
            for sign in (1, -1)
        ]
        numeric = ((value[0] - value[1]) / (2 * step)).real
        analytic = 0.0 if got is None else float(np.sum(np.conj(got.numpy()) * direction).real)
        # central differences: error step^2 * third derivative, plus rounding eps * |f| / step
        bound = 1e-5 * max(1.0, abs(numeric)) + 1e-15 * max(abs(v) for v in value) * case.terms / step
        assert abs(numeric - analytic) <= bound, (
            f"input {at}: finite differences {numeric}, tape {analytic}, bound {bound}"
        )


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


def check_autocast(case: Case) -> None:
    """Under bfloat16 autocast class "low" gives bfloat16, class "fp32" float32; "widest" keeps the widest."""
    op = case.fn.op
    args = case.arguments()
    plain = [a.dtype for a in arrays(case.fn(*tensors(args), **tensors_in(case.kwargs)))]
    amp_policy.active.policy = amp_policy.Policy(low=dtypes.bfloat16)
    try:
        cast = [a.dtype for a in arrays(case.fn(*tensors(args), **tensors_in(case.kwargs)))]
    finally:
        amp_policy.active.policy = None
    for before, after in zip(plain, cast, strict=True):
        if before != dtypes.float32:
            assert after == before
        elif case.amp_out:
            assert after == case.amp_out
        elif op.amp == "low":
            assert after == dtypes.bfloat16, f"amp='low' but the output is {after}"
        else:
            assert after == dtypes.float32
