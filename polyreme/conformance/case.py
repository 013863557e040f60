"""What a row of the contract table is, and the checks that every row passes.

A row says how to call one public function and what NumPy gives for the same call. From it follow: eager equals NumPy,
captured equals eager, gradient equals finite differences, dtype under autocast, and the documented error on bad input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import ml_dtypes
import numpy as np

from polyreme.core import amp_policy, rng
from polyreme.core import dtype as dtypes
from polyreme.core.op import OPS
from polyreme.eager import walk
from polyreme.eager.tensor import Tensor
from polyreme.jit import not_to_static, to_static


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
    no_ref_grad: str = ""  # why the oracle is no function to differentiate: finite differences are the op's
    bad: tuple[tuple, type[Exception], str] | None = None
    check: Callable[..., None] | None = None
    amp_out: str | tuple[str, ...] = ""  # dtype of the results, or of each, under autocast where not the op's class's
    host: str = ""  # why the function needs the value on the host and so cannot be captured
    tag: str = ""
    factor_eps: float = 0.0  # what the device rounds the factors of float32 products to, where that is more than eps

    @property
    def id(self) -> str:
        return f"{self.name}-{self.tag}" if self.tag else self.name

    @property
    def fn(self) -> Callable[..., Any]:
        return OPS[self.name]

    def call(self, args: Any) -> Any:
        """The row's function on these positional arguments and the row's keywords."""
        return self.fn(*args, **tensors_in(self.kwargs))

    @not_to_static
    def call_with_gradients(self, args: Any) -> tuple[list[Tensor], list[Tensor | None]]:
        """The outputs, and the gradients of the sum of outputs times weights with respect to each inexact argument.

        The weights are handed to the tape as cotangents, so that nothing but the call and its backward is compiled.
        """
        args = as_leaves(args)
        outs = flat(self.call(args))
        inexact = [t for t in outs if dtypes.is_inexact(t.dtype)]
        assert inexact, "no floating output: say no_grad"
        roots = [(t, w) for t, w in zip(inexact, weights(inexact), strict=True) if not t.stop_gradient]
        assert roots, "nothing was taped"
        grads = walk.grad(
            [t for t, _ in roots],
            [t for t in flat(args) if not t.stop_gradient],
            # of sum(out * weight), in the convention dL/dx + i dL/dy
            tensors([np.asarray(np.conj(weight), t.dtype) for t, weight in roots]),
            retain_graph=False,
            create_graph=False,
            allow_unused=True,
            no_grad_vars=[],
        )
        return outs, grads

    def arguments(self) -> tuple:
        # one seed a name, so that a row's data does not depend on the other rows
        return self.make(np.random.default_rng(sum(self.id.encode())))


def tensors(value: Any) -> Any:
    """Arguments with every ndarray as a Tensor; not by to_tensor, which compiles a copy for each new shape."""
    if isinstance(value, np.ndarray):
        return Tensor(jax.device_put(value.copy()))
    if isinstance(value, (list, tuple)):
        return type(value)(tensors(v) for v in value)
    return value


def as_leaves(value: Any) -> Any:
    """Arguments with every Tensor as another with the same value, without history, that wants a gradient if inexact."""
    if isinstance(value, Tensor):
        return Tensor(value._array, stop_gradient=not dtypes.is_inexact(value.dtype))
    if isinstance(value, (list, tuple)):
        return type(value)(as_leaves(v) for v in value)
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


def tolerance(dtype: np.dtype, terms: int, factor_eps: float = 0.0) -> float:
    """Relative error of a sum of `terms` values each rounded to dtype, with a factor 4 for the functions inside.

    factor_eps: where float32 is wider than what factors are rounded to, that of the latter.
    """
    if not dtypes.is_inexact(dtype):
        return 0.0
    eps = _eps(dtype)
    return 4 * terms * (max(eps, factor_eps) if dtype in _SINGLE else eps)


_SINGLE = {np.dtype("float32"), np.dtype("complex64")}


def _eps(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).eps) if dtypes.is_floating(dtype) else float(np.finfo(dtype).eps)


def assert_close(got: list[np.ndarray], want: list[np.ndarray], terms: int, factor_eps: float = 0.0) -> None:
    """Same number of arrays, same shapes, values within the computed tolerance."""
    assert len(got) == len(want), f"{len(got)} outputs, oracle has {len(want)}"
    for g, w in zip(got, want, strict=True):
        w = np.asarray(w)
        assert g.shape == w.shape, f"shape {g.shape}, oracle has {w.shape}"
        if not dtypes.is_inexact(g.dtype):
            np.testing.assert_array_equal(g, w)
            continue
        bound = tolerance(g.dtype, terms, factor_eps)
        finite = np.abs(w[np.isfinite(w)])
        scale = float(finite.max()) if finite.size else 1.0
        np.testing.assert_allclose(
            g.astype(w.dtype) if w.dtype.kind in "fc" else g, w, rtol=bound, atol=bound * max(scale, 1e-3)
        )


def check_row(case: Case, *, first: bool, bad: bool = True) -> None:
    """NumPy's results, in no wider dtype; gradients equal to finite differences; the documented error on bad input.

    A row with a gradient is captured: that runs what an eager call does, on traced arrays, with the gradient in the
    same program, and programs are nearly all of the time. A row without one is called eagerly, which is quicker. first:
    the op's first row, which is run both ways, captured in float64 where it has a gradient, so that both widths are
    run, and traced under autocast.
    """
    graded = not case.no_grad
    eager = check_eager(case) if first or case.host or not graded else None
    if graded or (first and not case.host):
        result, grads = outcome(case, wide=first and graded)
        if eager is not None:
            # the captured program may fuse what eager runs op by op, and round between other terms
            assert_close(arrays(eager), arrays(result), case.terms, case.factor_eps)
        else:
            check_values(case, result)
        if graded:
            check_gradient(case, grads)
    if first:
        check_autocast(case)
    if case.bad and bad:
        check_bad(case)


def check_eager(case: Case) -> Any:
    """The result of the call, run op by op from seed 7 and looked at as check_values does."""
    rng.seed(7)
    result = case.call(tensors(case.arguments()))
    check_values(case, result)
    return result


def outcome(case: Case, *, wide: bool) -> tuple[Any, list[np.ndarray | None]]:
    """The result of the call from seed 7, captured where it can be, and its gradients, none for a row with no_grad.

    wide: inexact arguments as float64 or complex128.
    """
    run = case.call if case.no_grad else case.call_with_gradients
    args = case.arguments()
    rng.seed(7)
    result = (run if case.host else to_static(run))(tensors(_widen(args) if wide else args))
    if case.no_grad:
        return result, []
    outs, grads = result
    return outs, [None if g is None else g.numpy() for g in grads]


_DOUBLE = {np.dtype("float64"), np.dtype("complex128")}


def _is_double(value: Any) -> bool:
    """Whether an argument is, or asks for, float64 or complex128."""
    kind = getattr(value, "dtype", value)
    return (
        kind in ("float64", "complex128") if isinstance(kind, str) else isinstance(kind, np.dtype) and kind in _DOUBLE
    )


def _leaves(value: Any) -> list[Any]:
    return [leaf for v in value for leaf in _leaves(v)] if isinstance(value, (list, tuple)) else [value]


def check_values(case: Case, result: Any) -> None:
    """A result against NumPy's, and what the row's own check says of it; no wider than what the row asks for."""
    assert case.ref is not None or case.check is not None, "a row needs an oracle or a check"
    if case.check is not None:
        case.check(*arrays(result))
    args = case.arguments()
    if case.ref is not None:
        assert_close(arrays(result), reference(case, args), case.terms, case.factor_eps)
    if not any(_is_double(leaf) for leaf in _leaves((*args, *case.kwargs.values()))):
        assert not any(_is_double(t.dtype) for t in flat(result)), f"float64 of narrower inputs: {flat(result)}"


def reference(case: Case, args: tuple) -> list[np.ndarray]:
    """What the row's oracle gives for these arguments."""
    assert case.ref is not None
    want = case.ref(*args, **case.kwargs)
    return [np.asarray(w) for w in (want if isinstance(want, (tuple, list)) else [want])]


class NothingRaised(AssertionError):
    """Bad input was taken."""


def check_bad(case: Case) -> None:
    """The documented error on bad input."""
    assert case.bad is not None
    args, error, match = case.bad
    try:
        arrays(case.call(tensors(args)))
    except error as caught:
        text = str(caught)
    else:
        raise NothingRaised(f"no {error.__name__} of bad input")
    assert re.search(match, text), f"{error.__name__} says {text!r}, not {match!r}"


def tensors_in(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments with every ndarray as a Tensor."""
    return {k: tensors(v) for k, v in kwargs.items()}


def _widen(value: Any) -> Any:
    if isinstance(value, np.ndarray) and dtypes.is_inexact(value.dtype):
        return value.astype(np.complex128 if np.iscomplexobj(value) else np.float64)
    if isinstance(value, (list, tuple)):
        return type(value)(_widen(v) for v in value)
    return value


def check_gradient(case: Case, grads: list[np.ndarray | None]) -> None:
    """Gradients that call_with_gradients returned against central differences in float64, one direction an input.

    What is differentiated is the sum of all outputs times fixed weights. The shifted outputs are the oracle's, where it
    computes in float64, so that nothing is compiled for them; else the op's.
    """
    args = _widen(case.arguments())
    values = _differentiable(case, args)
    leaves = _inexact_leaves(args)
    assert len(leaves) == len(grads)
    step = 1e-5
    for index, (leaf, got) in enumerate(zip(leaves, grads, strict=True)):
        direction = np.random.default_rng(index + 2).uniform(0.5, 1.5, leaf.shape)
        if np.iscomplexobj(leaf):
            direction = direction * (1 + 0.5j)
        value = []
        for sign in (1, -1):
            shifted = values(_shifted(args, index, sign * step * direction))
            value.append(complex(sum(np.sum(v * w) for v, w in zip(shifted, weights(shifted), strict=True))))
        numeric = ((value[0] - value[1]) / (2 * step)).real
        slopes = np.zeros(()) if got is None else np.conj(got) * direction
        analytic = float(np.sum(slopes).real)
        # central differences: error step^2 * third derivative, plus rounding eps * |f| / step
        bound = 1e-5 * max(1.0, abs(numeric)) + 1e-15 * max(abs(v) for v in value) * case.terms / step
        if got is not None:
            bound += tolerance(got.dtype, case.terms, case.factor_eps) * float(np.sum(np.abs(slopes)))
        assert abs(numeric - analytic) <= bound, (
            f"input {index}: finite differences {numeric}, tape {analytic}, bound {bound}"
        )


def weights(outs: Any) -> list[np.ndarray]:
    """What each inexact output is multiplied by in the sum that is differentiated."""
    generator = np.random.default_rng(1)
    # complex ones, so that the real part of the sum depends on the imaginary parts of the outputs too
    return [generator.uniform(0.5, 1.5, o.shape) * (1 - 0.7j if dtypes.is_complex(o.dtype) else 1) for o in outs]


def _differentiable(case: Case, args: tuple) -> Callable[[tuple], list[np.ndarray]]:
    """A function of arguments in float64 to the inexact outputs in float64: the oracle if it is one, or the op."""

    def of_oracle(args: tuple) -> list[np.ndarray]:
        return [w for w in reference(case, args) if dtypes.is_inexact(w.dtype)]

    def of_op(args: tuple) -> list[np.ndarray]:
        return [t.numpy() for t in _inexact(case.call(tensors(args)))]

    if case.ref is None or case.no_ref_grad or not all(_is_double(w.dtype) for w in of_oracle(args)):
        return of_op
    return of_oracle


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
    return _with_shift(args, iter(range(10**6)), at, delta)


def _with_shift(value: Any, counter: Iterator[int], at: int, delta: np.ndarray) -> Any:
    if isinstance(value, np.ndarray) and dtypes.is_inexact(value.dtype):
        return value + delta if next(counter) == at else value
    if isinstance(value, (list, tuple)):
        return type(value)(_with_shift(v, counter, at, delta) for v in value)
    return value


def check_autocast(case: Case) -> None:
    """Under bfloat16 autocast class "low" gives bfloat16, class "fp32" float32; "widest" keeps the widest."""
    if not hasattr(case.fn, "op"):
        return
    op = case.fn.op
    args = tensors(case.arguments())

    def dtypes_of_call() -> list[np.dtype]:
        # dtypes alone, so that nothing is compiled
        def call() -> list[Any]:
            return [t._array for t in flat(case.call(args))]

        return [a.dtype for a in (call() if case.host else jax.eval_shape(call))]

    before = dtypes_of_call()
    amp_policy.active.policy = amp_policy.Policy(low=dtypes.bfloat16)
    try:
        after = dtypes_of_call()
    finally:
        amp_policy.active.policy = None
        # tracing has left its own value in the generator
        rng.seed(7)
    wanted = (case.amp_out,) * len(after) if isinstance(case.amp_out, str) else case.amp_out
    for plain, cast, amp_out in zip(before, after, wanted, strict=True):
        if plain != dtypes.float32:
            assert cast == plain
        elif amp_out:
            assert cast == amp_out
        elif op.amp == "low":
            assert cast == dtypes.bfloat16, f"amp='low' but the output is {cast}"
        else:
            assert cast == dtypes.float32
