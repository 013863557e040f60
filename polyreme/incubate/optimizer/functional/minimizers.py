"""minimize_bfgs and minimize_lbfgs: the minimum of a function of one vector.

The objective is traced once, and the whole minimization is one compiled program; inside a captured function
it is part of that one. Called eagerly it is compiled at each call: capture the caller to compile it once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.kernel import Kernel
from polyreme.core.state import TensorState
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.jit.region import Out, evaluate, trace
from polyreme.optimizer.groups import nonnegative
from polyreme.optimizer.minimize import Limits, Minimum, bfgs, lbfgs


def minimize_bfgs(
    objective_func: Callable[[Tensor], Tensor],
    initial_position: Tensor,
    max_iters: int = 50,
    tolerance_grad: float = 1e-7,
    tolerance_change: float = 1e-9,
    initial_inverse_hessian_estimate: Tensor | None = None,
    line_search_fn: str = "strong_wolfe",
    max_line_search_iters: int = 50,
    initial_step_length: float = 1.0,
    dtype: str = "float32",
    name: str | None = None,
) -> tuple[Tensor, ...]:
    """(is_converge, num_func_calls, position, objective_value, objective_gradient, inverse_hessian_estimate) of BFGS.

    objective_func: [n] -> one number. Converged: no gradient above tolerance_grad, or a step that changed the value or
    every coordinate by no more than tolerance_change. initial_inverse_hessian_estimate: [n, n], symmetric and positive
    definite; the identity if None. dtype: that of initial_position. Nothing is taped.
    Source: Nocedal and Wright, Numerical Optimization, 2nd edition, algorithm 6.1.

    >>> minimize_bfgs(lambda x: ((x - 3) ** 2).sum(), Tensor([0.0, 1.0]))[2].tolist()
    [3.0, 3.0]
    """
    limits = _limits(max_iters, max_line_search_iters, tolerance_grad, tolerance_change, initial_step_length)
    start, first = _check("minimize_bfgs", initial_position, initial_inverse_hessian_estimate, line_search_fn, dtype)

    def solve(objective: Any, position: Any, inverse: Any) -> Minimum:
        return bfgs(objective, position, inverse, limits)

    return _run("minimize_bfgs", objective_func, start, first, solve, with_memory=True)


def minimize_lbfgs(
    objective_func: Callable[[Tensor], Tensor],
    initial_position: Tensor,
    history_size: int = 100,
    max_iters: int = 50,
    tolerance_grad: float = 1e-8,
    tolerance_change: float = 1e-8,
    initial_inverse_hessian_estimate: Tensor | None = None,
    line_search_fn: str = "strong_wolfe",
    max_line_search_iters: int = 50,
    initial_step_length: float = 1.0,
    dtype: str = "float32",
    name: str | None = None,
) -> tuple[Tensor, ...]:
    """(is_converge, num_func_calls, position, objective_value, objective_gradient) of L-BFGS.

    history_size: pairs of vectors kept. initial_inverse_hessian_estimate: what they correct; if None the identity times
    s.y / y.y of the last pair. Otherwise as minimize_bfgs. Source: Nocedal and Wright, algorithm 7.5.

    >>> minimize_lbfgs(lambda x: ((x - 3) ** 2).sum(), Tensor([0.0, 1.0]))[2].tolist()
    [3.0, 3.0]
    """
    pairs = _check_count("history_size", history_size)
    limits = _limits(max_iters, max_line_search_iters, tolerance_grad, tolerance_change, initial_step_length)
    start, first = _check("minimize_lbfgs", initial_position, initial_inverse_hessian_estimate, line_search_fn, dtype)

    def solve(objective: Any, position: Any, inverse: Any) -> Minimum:
        return lbfgs(objective, position, inverse, pairs, limits)

    return _run("minimize_lbfgs", objective_func, start, first, solve, with_memory=False)


def _run(
    what: str, function: Callable, start: Tensor, first: Tensor | None, solve: Callable, *, with_memory: bool
) -> tuple[Tensor, ...]:
    array = state.read(start)

    def call(position: Any) -> list[Any]:
        with tape.GradEnabled(True):
            return [function(Tensor(position, stop_gradient=False))]

    region = trace(call, [jax.ShapeDtypeStruct(array.shape, array.dtype)])
    (value,) = region.values[0][1] if len(region.values[0][1]) == 1 else (None,)
    if not isinstance(value, Out) or int(np.prod(value.shape)) != 1:
        got = f"shape {list(value.shape)}" if isinstance(value, Out) else "no Tensor"
        raise ShapeError(f"{what}: objective_func must return one number, its result has {got}; sum it first")
    starts = [] if first is None else [state.read(first)]

    def fn(position: Any, *rest: Any) -> tuple:
        consts = rest[len(starts) :]

        def objective(x: Any) -> tuple[Any, Any]:
            return jax.value_and_grad(lambda x: evaluate(region, consts, x)[value.index].reshape(()).astype(x.dtype))(x)

        found = solve(objective, position, rest[0] if starts else None)
        outs = (found.converged, found.calls, found.position, found.value, found.gradient)
        return (*outs, found.memory) if with_memory else outs

    arrays = (array, *starts, *region.closed.consts)
    return tape.apply(Kernel(fn, what), arrays, (None,) * len(arrays))


def _check(what: str, position: Any, inverse: Any, line_search_fn: Any, dtype: Any) -> tuple[Tensor, Tensor | None]:
    if line_search_fn != "strong_wolfe":
        raise ConfigError(f"{what}: line_search_fn is 'strong_wolfe', got {line_search_fn!r}")
    wanted = dtypes.as_dtype(dtype)
    if wanted not in (dtypes.float32, dtypes.float64):
        raise DTypeError(f"{what}: dtype is 'float32' or 'float64', got {dtype!r}")
    if not isinstance(position, TensorState) or position._array.ndim != 1:
        got = list(position._array.shape) if isinstance(position, TensorState) else type(position).__name__
        raise ShapeError(f"{what}: initial_position is a 1-D Tensor, got {got}; flatten it")
    n = position._array.shape[0]
    for name, tensor in (("initial_position", position), ("initial_inverse_hessian_estimate", inverse)):
        if tensor is not None and tensor._array.dtype != wanted:
            raise DTypeError(
                f"{what}: {name} is {tensor._array.dtype.name} but dtype={wanted.name}; make them the same"
            )
    if inverse is not None:
        _check_inverse(what, inverse, n)
    return position, inverse  # type: ignore[return-value]


def _check_inverse(what: str, inverse: TensorState, n: int) -> None:
    shape = list(inverse._array.shape)
    if shape != [n, n]:
        raise ShapeError(f"{what}: initial_inverse_hessian_estimate has shape {shape}, needs [{n}, {n}]")
    if isinstance(inverse._array, state.Tracer):
        return
    matrix = state.host(inverse, what)
    if not np.allclose(matrix, matrix.T) or np.linalg.eigvalsh(matrix).min(initial=1) <= 0:
        raise ConfigError(f"{what}: initial_inverse_hessian_estimate must be symmetric and positive definite")


def _limits(iterations: Any, search: Any, gradient: Any, change: Any, step: Any) -> Limits:
    return Limits(
        _check_count("max_iters", iterations),
        _check_count("max_line_search_iters", search),
        nonnegative("minimize", "tolerance_grad", gradient),
        nonnegative("minimize", "tolerance_change", change),
        nonnegative("minimize", "initial_step_length", step),
    )


def _check_count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"minimize: {name} is a whole number of at least 1, got {value!r}")
    return value
