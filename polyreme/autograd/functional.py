"""Gradients as functions: grad, backward, vjp, jvp and hvp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import jax.numpy as jnp

from polyreme.autograd.derivation import derivation
from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.state import TensorState
from polyreme.core.taylor.jet import JetSpec
from polyreme.eager import tape, walk
from polyreme.eager.forward import Jet, push
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, DTypeError, GradError

Tensors = Tensor | Sequence[Tensor]


@overload
def grad(
    outputs: Tensors,
    inputs: Tensors,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: Literal[False] = False,
    no_grad_vars: Any = None,
    dump_backward_graph_path: str | None = None,
) -> list[Tensor]: ...


@overload
def grad(
    outputs: Tensors,
    inputs: Tensors,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    *,
    allow_unused: bool,
    no_grad_vars: Any = None,
    dump_backward_graph_path: str | None = None,
) -> list[Tensor | None]: ...


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
    return walk.grad(
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
    walk.backward(roots, starts("backward", "grad_tensors", grad_tensors, len(roots)), bool(retain_graph))


@derivation
def vjp(func: Callable[..., Any], xs: Tensors, v: Any = None) -> tuple[Any, Any]:
    """(func(*xs), v times the Jacobian of func at xs), in the structures of func's result and of xs.

    v: of the result's shape; ones if None. Differentiable with respect to xs that want gradients and to what func reads
    (a network's parameters).
    """
    call = DetachedCall("vjp", func, xs)
    begins = starts("vjp", "v", v, len(call.outputs))
    with tape.GradEnabled(True):
        found = walk.grad(
            call.outputs, call.inputs, begins,
            retain_graph=True, create_graph=call.is_taped, allow_unused=True, no_grad_vars=[],
        )  # fmt: skip
    gradients = [zeros(x) if g is None else g for g, x in zip(found, call.inputs, strict=True)]
    return call.result, _like(xs, gradients)


@derivation
def jvp(func: Callable[..., Any], xs: Tensors, v: Any = None) -> tuple[Any, Any]:
    """(func(*xs), the Jacobian of func at xs times v), both in the structure of func's result.

    v: of the shapes of xs; ones if None. Forward mode: costs about as much as func again, whatever the sizes.
    Differentiable with respect to xs that want gradients, to v and to what func reads (a network's parameters).
    """
    call = DetachedCall("jvp", func, xs)
    tangents = call.along(*directions("jvp", v, call.inputs))
    return call.result, call.shaped([jet[0] for jet in tangents])


@derivation
def hvp(func: Callable[..., Any], xs: Tensors, v: Any = None) -> tuple[Any, Any]:
    """(func(*xs), the Hessian of the scalar func at xs times v), the second in the structure of xs.

    Forward mode over reverse mode: no row of the Hessian is computed. Raises GradError if func's result has more than
    one element.

    >>> x = Tensor([1.0, 2.0])
    >>> hvp(lambda x: (x * x * x).sum(), x, Tensor([1.0, 0.0]))[1].tolist()
    [6.0, 0.0]
    """
    values: list[Any] = []

    def gradient(*inputs: Tensor) -> Any:
        y = func(*inputs)
        (root,) = as_list("hvp", "func's result", [y])
        if root.size != 1:
            raise GradError(f"hvp: func must return one number, its result has shape {list(root.shape)}; sum it first")
        values.append(y)
        found = walk.grad(
            [root], inputs, [None], retain_graph=True, create_graph=True, allow_unused=True, no_grad_vars=[]
        )
        return _like(xs, [zeros(x) if g is None else g for g, x in zip(found, inputs, strict=True)])

    _, product = jvp(gradient, xs, v)
    return values[0], product


class DetachedCall:
    """A function called on Tensors of its own with the values of xs, and what its result depends on.

    inputs: those Tensors, tied to xs that want gradients. result, outputs: what func returned, as it is and as a list.
    is_taped: derivatives are to be differentiable in turn: an x or something else that func read wants gradients.
    """

    wants: bool
    result: Any
    outputs: list[Any]
    is_taped: bool

    def __init__(self, what: str, func: Callable[..., Any], xs: Any) -> None:
        tensors = as_list(what, "xs", xs)
        for at, x in enumerate(tensors):
            if not dtypes.is_inexact(x.dtype):
                raise DTypeError(f"{what}: x {at} is {x.dtype.name}, which has no derivatives; use astype('float32')")
        taping = tape.grad_mode.enabled
        self.wants = taping and any(not x.stop_gradient for x in tensors)
        with tape.GradEnabled(True):
            self.inputs: list[Tensor] = [
                Tensor(state.read(x), stop_gradient=False) if x.stop_gradient or not taping else x.clone()
                for x in tensors
            ]
            self.result = func(*self.inputs)
        self.outputs = as_list(what, "func's result", self.result)
        self.is_taped = self.wants or (taping and _reads_more(self.outputs, self.inputs))

    def along(self, jets: list[Jet], spec: JetSpec) -> list[Jet]:
        """The coefficients of each output for those of the inputs; zeros written out."""
        is_taped = self.is_taped or (tape.grad_mode.enabled and _wanting(jets))
        with tape.GradEnabled(is_taped):
            pairs = list(zip(self.inputs, jets, strict=True))
            found = push(self.outputs, pairs, spec, constants=not self.wants)
            return [_fill(y, jet, spec) for y, jet in zip(self.outputs, found, strict=True)]

    def shaped(self, values: list[Any]) -> Any:
        """One value for each output, in the structure of func's result."""
        return _like(self.result, values)


def directions(what: str, v: Any, inputs: list[Tensor], order: int = 1) -> tuple[list[Jet], JetSpec]:
    """What to push along one direction v: ones where None."""
    jets: list[Jet] = []
    for x, d in zip(inputs, starts(what, "v", v, len(inputs)), strict=True):
        if d is not None and d.shape != x.shape:
            raise GradError(
                f"{what}: a direction in v has shape {list(d.shape)}, its x {list(x.shape)}; give it the shape of x"
            )
        if d is not None and dtypes.is_complex(d.dtype) and not dtypes.is_complex(x.dtype):
            raise DTypeError(f"{what}: a direction in v is {d.dtype.name}, its x {x.dtype.name}; give a real one")
        first = Tensor(jnp.ones(x._array.shape, x._array.dtype)) if d is None else d.astype(x.dtype)
        jets.append((first, *[None] * (order - 1)))
    return jets, JetSpec(order)


def _wanting(jets: list[Jet]) -> bool:
    return any(c is not None and not c.stop_gradient for jet in jets for c in jet)


def _fill(y: TensorState, jet: Jet | None, spec: JetSpec) -> Jet:
    whole = (None,) * (spec.ways * spec.num_coefficients + spec.collapsed) if jet is None else jet
    return tuple(zeros(y) if c is None else c for c in whole)


def _reads_more(outputs: Sequence[TensorState], inputs: Sequence[Tensor]) -> bool:
    """True if the outputs depend on something that wants gradients besides the inputs."""
    own = {tape.edge_key(tape.edge_of(x)) for x in inputs}
    stack, seen = [tape.edge_of(y) for y in outputs], set()
    while stack:
        edge = stack.pop()
        if edge is None or tape.edge_key(edge) in own:
            continue
        if not isinstance(edge, tuple) or not edge[0].edges:
            return True
        if edge[0] not in seen:
            seen.add(edge[0])
            stack.extend(edge[0].edges)
    return False


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
    vectors = list(given) if isinstance(given, (list, tuple)) else [given]
    if len(vectors) != count:
        raise GradError(f"{what}: {len(vectors)} entries in {name} for {count} Tensors; give one for each, or None")
    for each in vectors:
        if each is not None and not isinstance(each, TensorState):
            raise GradError(f"{what}: {name} holds Tensors or None, got {type(each).__name__}")
    return vectors


def zeros(like: TensorState) -> Tensor:
    """Zeros of a Tensor's shape and dtype."""
    return Tensor(jnp.zeros(like._array.shape, like._array.dtype))


def _like(structure: Any, results: list[Any]) -> Any:
    return results[0] if isinstance(structure, TensorState) else tuple(results)


def _no_dump(what: str, path: Any) -> None:
    if path is not None:
        raise ConfigError(f"{what}: dump_backward_graph_path={path!r} is not supported; leave it out")
