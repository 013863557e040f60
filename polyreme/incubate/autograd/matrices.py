"""Jacobian and Hessian of functions: all inputs in a row against all outputs in a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyreme.autograd import matrices
from polyreme.autograd.derivation import derivation
from polyreme.autograd.functional import Tensors, as_list, zeros
from polyreme.core import state
from polyreme.core.state import TensorState
from polyreme.eager import tape, walk
from polyreme.eager.tensor import Tensor
from polyreme.errors import ShapeError
from polyreme.ops.manipulation import concat, reshape


class Jacobian(matrices.Jacobian):
    """The Jacobian of func at xs: every element of func's results by every element of xs, each flattened in order.

    Not batched: [M, N], M and N being the numbers of elements. is_batched: dim 0 of every input and result is the
    batch, each sample's results depending on its own inputs -> [B, M, N]. Indexing computes the rows that it needs, and
    `J[:]` all at once by forward mode if N <= M. Differentiable with respect to xs that want gradients.

    >>> J = Jacobian(lambda x, y: x * y, [Tensor([1.0, 2.0]), Tensor([3.0, 4.0])])
    >>> J[0].tolist()
    [3.0, 0.0, 1.0, 0.0]
    """

    def __new__(cls, func: Callable[..., Any], xs: Tensors, is_batched: bool = False) -> Any:
        """In static mode the whole matrix, as a Variable: the Program does not know yet which rows are asked for."""
        return super().__new__(cls) if state.recorder() is None else jacobian_matrix(func, xs, is_batched)

    def __init__(self, func: Callable[..., Any], xs: Tensors, is_batched: bool = False) -> None:
        with tape.GradEnabled(True):
            joined, ys = _call("Jacobian", func, xs, is_batched)
            row = _in_a_row("Jacobian: func's result", as_list("Jacobian", "func's result", ys), is_batched)
        super().__init__(row, joined, is_batched)


class Hessian(matrices.Hessian):
    """The Hessian of a scalar func (one number, or one per sample if is_batched) at xs, each flattened in order.

    [N, N], or [B, N, N] if batched; otherwise as Jacobian. `H[:]` is forward mode over reverse mode, in one pass.
    Raises ShapeError if func's result has more elements.
    """

    def __new__(cls, func: Callable[..., Any], xs: Tensors, is_batched: bool = False) -> Any:
        """In static mode the whole matrix, as a Variable."""
        return super().__new__(cls) if state.recorder() is None else hessian_matrix(func, xs, is_batched)

    def __init__(self, func: Callable[..., Any], xs: Tensors, is_batched: bool = False) -> None:
        with tape.GradEnabled(True):
            joined, ys = _call("Hessian", func, xs, is_batched)
            (y,) = as_list("Hessian", "func's result", [ys])
            if y.size != (joined.shape[0] if is_batched else 1):
                each = " per sample" if is_batched else ""
                raise ShapeError(
                    f"Hessian: func's result has shape {list(y.shape)}, needs one element{each}; sum it first"
                )
        gradient: Any = None
        if not y.stop_gradient:
            (gradient,) = walk.grad(
                [y], [joined], [None], retain_graph=True, create_graph=True, allow_unused=True, no_grad_vars=[]
            )
        super().__init__(zeros(joined) if gradient is None else gradient, joined, is_batched)


@derivation
def jacobian_matrix(func: Callable[..., Any], xs: Tensors, is_batched: bool = False) -> Tensor:
    """All of a Jacobian."""
    return Jacobian(func, xs, is_batched)[:]


@derivation
def hessian_matrix(func: Callable[..., Any], xs: Tensors, is_batched: bool = False) -> Tensor:
    """All of a Hessian."""
    return Hessian(func, xs, is_batched)[:]


def _call(what: str, func: Callable[..., Any], xs: Any, is_batched: bool) -> tuple[Tensor, Any]:
    """(all of xs in a row, func of its pieces)."""
    given = as_list(what, "xs", xs)
    own = [Tensor(state.read(x), stop_gradient=False) if x.stop_gradient else x for x in given]
    joined = _in_a_row(f"{what}: xs", own, is_batched)
    pieces, at = [], 0
    for x in given:
        size = x.size // (x.shape[0] or 1) if is_batched else x.size
        pieces.append(reshape(joined[..., at : at + size], x.shape))
        at += size
    return joined, func(*pieces)


def _in_a_row(name: str, tensors: Sequence[TensorState], is_batched: bool) -> Tensor:
    """All elements one after the other: [N], or [B, N] if batched."""
    if is_batched and (not all(t._array.ndim for t in tensors) or len({t._array.shape[0] for t in tensors}) > 1):
        shapes = [list(t._array.shape) for t in tensors]
        raise ShapeError(f"{name} of shapes {shapes}: with is_batched=True dim 0 is the batch, the same in all of them")
    rows = [reshape(t, [t._array.shape[0], -1] if is_batched else [-1]) for t in tensors]
    return concat(rows, axis=-1)
