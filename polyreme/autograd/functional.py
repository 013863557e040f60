"""Gradients as functions: grad, backward, vjp and jvp.

Floor: 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from polyreme.core.state import TensorState
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, GradError

Tensors = Tensor | Sequence[Tensor]


def grad(
    outputs: Tensors,
    inputs: Tensors,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool = False,
    no_grad_vars: Any = None,
    dump_backward_graph_path: str | None = None,
) -> list[Tensor | None]:
    """Gradients of the sum of outputs with respect to each input; nobody's .grad is changed.

    grad_outputs: what each output's gradient starts from, of its shape; ones where None. create_graph: the result can
    be differentiated again. retain_graph: keep the tape for another pass; as create_graph by default. allow_unused:
    None for an input that outputs do not depend on, instead of GradError. no_grad_vars: Tensors no gradient flows
    through.

    >>> x = Tensor(3.0, stop_gradient=False)
    >>> (dx,) = grad(x * x, x, create_graph=True)
    >>> (ddx,) = grad(dx, x)
    >>> dx.item(), ddx.item()
    (6.0, 2.0)
    """
    if not only_inputs:
        raise ConfigError("grad: only_inputs=False also fills other leaves' .grad; call backward() for that")
    _no_dump("grad", dump_backward_graph_path)
    roots, leaves = as_list("grad", "outputs", outputs), as_list("grad", "inputs", inputs)
    return tape.grad(
        roots,  # type: ignore[return-value]
        leaves,
        starts("grad", "grad_outputs", grad_outputs, len(roots)),
        retain_graph=create_graph if retain_graph is None else bool(retain_graph),
        create_graph=bool(create_graph),
        allow_unused=bool(allow_unused),
        no_grad_vars=[] if no_grad_vars is None else as_list("grad", "no_grad_vars", no_grad_vars),
    )


def backward(
    tensors: Tensors, grad_tensors: Any = None, retain_graph: bool = False, dump_backward_graph_path: str | None = None
) -> None:
    """Add the gradients of tensors to `.grad` of every leaf, in one pass.

    grad_tensors: what each starts from, of its shape; ones where None.
    """
    _no_dump("backward", dump_backward_graph_path)
    roots = as_list("backward", "tensors", tensors)
    if len({id(t) for t in roots}) != len(roots):
        raise GradError("backward: a Tensor appears twice in tensors; give it once, with the sum of its gradients")
    tape.backward(roots, starts("backward", "grad_tensors", grad_tensors, len(roots)), bool(retain_graph))


def vjp(func: Callable[..., Any], xs: Tensors, v: Any = None) -> tuple[Any, Any]:
    """(func(*xs), v times the Jacobian of func at xs), in the structures of func's result and of xs.

    v: of the result's shape; ones if None. Differentiable with respect to xs that want gradients.
    """
    inputs, wants = _separate("vjp", xs)
    with tape.GradEnabled(True):
        ys = func(*inputs)
        outputs = as_list("vjp", "func's result", ys)
        found = tape.grad(
            outputs, inputs, starts("vjp", "v", v, len(outputs)),
            retain_graph=True, create_graph=wants, allow_unused=True, no_grad_vars=[],
        )  # fmt: skip
    return ys, _like(xs, [zeros(x) if g is None else g for g, x in zip(found, inputs, strict=True)])


def jvp(func: Callable[..., Any], xs: Tensors, v: Any = None) -> tuple[Any, Any]:
    """(func(*xs), the Jacobian of func at xs times v), both in the structure of func's result.

    v: of the shapes of xs; ones if None. Computed as the derivative with respect to u of u times the Jacobian, which is
    linear in u, so any function of ops will do. Differentiable with respect to xs that want gradients.
    """
    inputs, wants = _separate("jvp", xs)
    directions = starts("jvp", "v", v, len(inputs))
    with tape.GradEnabled(True):
        ys = func(*inputs)
        outputs = as_list("jvp", "func's result", ys)
        us = [Tensor(jnp.zeros(y._array.shape, y._array.dtype), stop_gradient=False) for y in outputs]
        back = tape.grad(outputs, inputs, us, retain_graph=True, create_graph=True, allow_unused=True, no_grad_vars=[])
        used = [(g, d) for g, d in zip(back, directions, strict=True) if g is not None and not g.stop_gradient]
        found: Sequence[Any] = [None] * len(us)
        if used:
            found = tape.grad(
                [g for g, _ in used], us, [d for _, d in used],
                retain_graph=True, create_graph=wants, allow_unused=True, no_grad_vars=[],
            )  # fmt: skip
    return ys, _like(ys, [zeros(y) if g is None else g for g, y in zip(found, outputs, strict=True)])


def as_list(what: str, name: str, given: Any) -> list[Any]:
    """given, one Tensor or a sequence of them, as a list. Raises GradError for anything else."""
    found = [given] if isinstance(given, TensorState) else list(given) if isinstance(given, (list, tuple)) else None
    if not found or not all(isinstance(t, TensorState) for t in found):
        raise GradError(f"{what}: {name} must be a Tensor or a non-empty list of Tensors, got {type(given).__name__}")
    return found


def starts(what: str, name: str, given: Any, count: int) -> list[Any]:
    """count gradients to start from, None where none is given. Raises GradError for another number of them."""
    if given is None:
        return [None] * count
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    if len(found) != count:
        raise GradError(f"{what}: {len(found)} entries in {name} for {count} Tensors; give one for each, or None")
    for each in found:
        if each is not None and not isinstance(each, TensorState):
            raise GradError(f"{what}: {name} holds Tensors or None, got {type(each).__name__}")
    return found


def zeros(like: TensorState) -> Tensor:
    """Zeros of a Tensor's shape and dtype."""
    return Tensor(jnp.zeros(like._array.shape, like._array.dtype))


def _separate(what: str, xs: Any) -> tuple[list[Tensor], bool]:
    """Tensors of the values of xs that want gradients, and whether one of xs does, to which they are then tied."""
    given = as_list(what, "xs", xs)
    with tape.GradEnabled(True):
        inputs = [Tensor(x._array, stop_gradient=False) if x.stop_gradient else x.clone() for x in given]
    return inputs, any(not x.stop_gradient for x in given)


def _like(structure: Any, found: list[Any]) -> Any:
    return found[0] if isinstance(structure, TensorState) else tuple(found)


def _no_dump(what: str, path: Any) -> None:
    if path is not None:
        raise ConfigError(f"{what}: dump_backward_graph_path={path!r} is not supported; leave it out")
