"""PyLayer: a function with a backward of the user's own.

On the tape it is one node whose gradient is the user's code. Inside a captured function the same rule is
told to jax too, since eager code differentiates a captured function as a whole.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.op import recorded
from polyreme.core.state import TensorState
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, GradError
from polyreme.jit.capture import Capture, watching


class PyLayerContext:
    """What forward hands to backward: saved Tensors, and any attribute it sets."""

    def __init__(self) -> None:
        # [array, edge]; for an output of the PyLayer the edge is known only once its node exists
        self._saved: list[list[Any] | None] = []
        self._packed: tape.Packed | None = None
        self._keys: list[int] = []
        self._materialize = True
        self._constant: set[int] = set()
        self._not_inplace: set[int] = set()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep Tensors, with the values they have now, for backward. Once per forward; GradError for anything else."""
        if self._saved:
            raise GradError("save_for_backward was called already in this forward; give it all Tensors at once")
        for t in tensors:
            if t is not None and not isinstance(t, TensorState):
                raise GradError(
                    f"save_for_backward takes Tensors, got {type(t).__name__}; set an attribute of ctx instead"
                )
        self._keys = [id(t) for t in tensors]
        self._saved = [None if t is None else [state.read(t), tape.edge_of(t)] for t in tensors]
        if tape.saved_hooks.pair is not None:
            self._packed = tape.Packed([entry[0] for entry in self._saved if entry is not None])
            self._saved = [None if entry is None else [None, entry[1]] for entry in self._saved]

    def saved_tensor(self) -> tuple[Tensor | None, ...]:
        """The Tensors that save_for_backward was given, connected to the tape as they were."""
        arrays = iter(self._arrays())
        return tuple(None if entry is None else _link(next(arrays), entry[1]) for entry in self._saved)

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        """saved_tensor() as an attribute."""
        return self.saved_tensor()

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """These outputs carry no gradient; backward gets zeros (or None) for them."""
        self._constant.update(map(id, tensors))

    def mark_not_inplace(self, *tensors: Tensor) -> None:
        """These inputs are returned without having been changed in place by intent: return new Tensors for them."""
        self._not_inplace.update(map(id, tensors))

    def set_materialize_grads(self, value: bool) -> None:
        """Whether backward gets zeros (the default) or None for an output that nothing depends on."""
        self._materialize = bool(value)

    def set_grad_in_dtype_consistent(self, flag: bool) -> None:
        """Whether backward gets gradients in the dtype of the outputs: they always come in it."""

    def _arrays(self) -> Sequence[Any]:
        return self._packed.arrays() if self._packed is not None else [e[0] for e in self._saved if e is not None]

    def _tensor_attributes(self) -> dict[str, TensorState]:
        return {n: v for n, v in self.__dict__.items() if isinstance(v, TensorState)}


class PyLayer:
    """Base of functions with their own backward; subclasses define two static methods and are called by `apply`.

    forward(ctx, *args, **kwargs) -> a Tensor, or a tuple or list of Tensors and other values. backward(ctx, *grads),
    with one gradient per Tensor that forward returned -> one gradient, or None, per Tensor among forward's arguments.
    forward is not taped. A backward made of ops can be differentiated again.

    >>> class Cube(PyLayer):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         ctx.save_for_backward(x)
    ...         return x * x * x
    ...     @staticmethod
    ...     def backward(ctx, g):
    ...         (x,) = ctx.saved_tensor()
    ...         return g * 3 * x * x
    >>> x = Tensor(2.0, stop_gradient=False)
    >>> Cube.apply(x).backward()
    >>> x.grad.item()
    12.0
    """

    @staticmethod
    def forward(ctx: PyLayerContext, *args: Any, **kwargs: Any) -> Any:
        """The function; each PyLayer defines it."""
        raise NotImplementedError("a PyLayer must define forward(ctx, *args) as a static method")

    @staticmethod
    def backward(ctx: PyLayerContext, *args: Any, **kwargs: Any) -> Any:
        """The gradients; each PyLayer defines it."""
        raise NotImplementedError("a PyLayer must define backward(ctx, *grads) as a static method")

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Call forward, taped as one step whose gradient is backward. In a static Program it is one operation."""
        return py_layer(cls, args, kwargs)


@recorded
def py_layer(layer: type[PyLayer], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """layer.apply(*args, **kwargs)."""
    ctx = PyLayerContext()
    inputs = [x for x in jax.tree.leaves((args, kwargs), is_leaf=_is_tensor) if _is_tensor(x)]
    before = [(x._array, state.read(x)) for x in inputs]
    edges = tuple(tape.edge_of(x) for x in inputs)
    with tape.GradEnabled(False):
        result = layer.forward(ctx, *args, **kwargs)
    many = isinstance(result, (tuple, list))
    outs = list(result) if many else [result]
    if not any(_is_tensor(o) for o in outs):
        raise GradError(f"{layer.__name__}.forward must return at least one Tensor, got {type(result).__name__}")
    made = _outputs(layer, ctx, inputs, before, edges, outs)
    return type(result)(made) if many else made[0]


Function = PyLayer


class PyNode(tape.Node):
    """A PyLayer's call on the tape."""

    layer: type[PyLayer]
    num_outputs: int
    outputs: list[Any]
    shapes: list[Any]

    known_to_jax: ClassVar[bool] = True  # by _tell_jax, wherever a capture is in progress
    __slots__ = ("context", "layer", "num_outputs", "outputs", "shapes")

    def __init__(
        self,
        layer: type[PyLayer],
        context: PyLayerContext,
        edges: tuple[Any, ...],
        shapes: list[Any],
        outputs: list[Any],
    ) -> None:
        super().__init__(layer.__name__, edges, tuple(outputs))
        self.layer = layer
        self.context: PyLayerContext | None = context
        self.shapes = shapes
        self.outputs = outputs
        self.num_outputs = len(outputs)

    def gradients(self, cotangents: list[Any], create_graph: bool) -> list[Any]:
        """What the user's backward gives, one per Tensor argument."""
        if self.context is None:
            raise tape.freed_error(self.name)
        return _call_backward(self.layer, self.context, cotangents, self.outputs, self.shapes)

    def release(self) -> None:
        """Let go of the context."""
        self.context = None

    def saved(self) -> list[Any]:
        """What save_for_backward was given, and the Tensors among the context's attributes."""
        assert self.context is not None  # a node that was freed is not saved again
        return [*self.context._arrays(), *(t._array for t in self.context._tensor_attributes().values())]

    def reload(self, arrays: Sequence[Any]) -> None:
        """The same context with other values."""
        assert self.context is not None
        kept = sum(entry is not None for entry in self.context._saved)
        attributes = dict(zip(self.context._tensor_attributes(), arrays[kept:], strict=True))
        again = _with_values(self.context, (arrays[:kept], attributes))
        for old, new in zip(self.context._saved, again._saved, strict=True):
            if old is not None and new is not None:
                new[1] = old[1]
        self.context = again

    @property
    def freed(self) -> bool:
        return self.context is None


def _call_backward(layer: type[PyLayer], ctx: PyLayerContext, cotangents: list, outputs: list, shapes: list) -> list:
    """layer.backward's gradients, checked: one per (shape, dtype) in shapes. outputs: the same of each output."""
    if ctx._materialize:
        zeros = [Tensor(jnp.zeros(*meta)) if c is None else c for c, meta in zip(cotangents, outputs, strict=True)]
        cotangents = zeros
    found = layer.backward(ctx, *cotangents)
    grads = list(found) if isinstance(found, (tuple, list)) else [found]
    if len(grads) != len(shapes):
        raise GradError(
            f"{layer.__name__}.backward returned {len(grads)} gradients, forward took {len(shapes)} Tensors; return "
            "one for each, None where there is none"
        )
    return [_fit(layer, i, g, meta) for i, (g, meta) in enumerate(zip(grads, shapes, strict=True))]


def _fit(layer: type[PyLayer], i: int, gradient: Any, meta: tuple) -> Tensor | None:
    if gradient is None or not dtypes.is_inexact(meta[1]):
        return None
    if not _is_tensor(gradient):
        raise GradError(
            f"{layer.__name__}.backward: gradient {i} is a {type(gradient).__name__}; return a Tensor or None"
        )
    if tuple(gradient._array.shape) != tuple(meta[0]):
        raise GradError(
            f"{layer.__name__}.backward: gradient {i} has shape {list(gradient.shape)}, its Tensor {list(meta[0])}; "
            "make them equal"
        )
    return gradient if gradient.dtype == meta[1] else gradient.astype(meta[1])


def _outputs(
    cls: type[PyLayer], ctx: PyLayerContext, inputs: list, before: list, edges: tuple, outs: list
) -> list[Any]:
    """What apply returns for what forward returned: the Tensors among it tied to a new node."""
    tensors = [o for o in outs if _is_tensor(o)]
    arrays = [state.read(t) for t in tensors]
    wanted = tape.grad_mode.enabled and any(e is not None for e in edges)
    node = None
    if wanted:
        shapes = [(a.shape, a.dtype) for a, _ in before]
        metas = [(a.shape, a.dtype) for a in arrays]
        if state.capturing():
            arrays = _tell_jax(cls, ctx, [b for _, b in before], arrays, shapes)
        node = PyNode(cls, ctx, edges, shapes, metas)
        _link_saved_outputs(ctx, tensors, node)
    changed = {id(x) for x, (b, _) in zip(inputs, before, strict=True) if x._array is not b} - ctx._not_inplace
    made = iter(
        [_output(ctx, t, a, node, i, id(t) in changed) for i, (t, a) in enumerate(zip(tensors, arrays, strict=True))]
    )
    return [next(made) if _is_tensor(o) else o for o in outs]


def _output(ctx: PyLayerContext, tensor: Any, array: Any, node: PyNode | None, index: int, inplace: bool) -> Tensor:
    carries = node is not None and id(tensor) not in ctx._constant and dtypes.is_inexact(array.dtype)
    if inplace and carries and not tensor.stop_gradient and tensor._node is None:
        raise GradError("PyLayer: forward changed in place a leaf Tensor that wants a gradient; return a new Tensor")
    out = tensor if inplace else Tensor(array)
    if inplace:
        state.write(out, array)
    if carries:
        out.stop_gradient, out._node, out._index = False, node, index
    return out


def _link_saved_outputs(ctx: PyLayerContext, tensors: list, node: PyNode) -> None:
    """Saved outputs are outputs of this very node, which lives as long as the context does."""
    place = {id(t): i for i, t in enumerate(tensors) if id(t) not in ctx._constant}
    for key, entry in zip(ctx._keys, ctx._saved, strict=True):
        if entry is not None and entry[1] is None and key in place:
            entry[1] = (node, place[key])


def _tell_jax(cls: type[PyLayer], ctx: PyLayerContext, inputs: list, outputs: list, shapes: list) -> list:
    """outputs, as arrays whose derivative for jax is what cls.backward says.

    A captured function that eager code differentiates is differentiated by jax, which would otherwise look inside
    forward.
    """
    carry_in = [i for i, a in enumerate(inputs) if dtypes.is_inexact(a.dtype)]
    carry_out = [i for i, a in enumerate(outputs) if dtypes.is_inexact(a.dtype)]
    metas = [(a.shape, a.dtype) for a in outputs]
    attributes = ctx._tensor_attributes()
    residuals = ([e[0] for e in ctx._saved if e is not None], {n: t._array for n, t in attributes.items()})
    frozen = copy.copy(ctx)

    @jax.custom_vjp
    def joined(given: list, results: list, residuals: tuple) -> list:
        return results

    def forward(given: list, results: list, residuals: tuple) -> tuple:
        return results, residuals

    def backward(residuals: tuple, cotangents: list) -> tuple:
        full: list[Any] = [None] * len(metas)
        with watching(Capture()) as capture, tape.GradEnabled(False):
            for i, c in zip(carry_out, cotangents, strict=True):
                full[i] = Tensor(jnp.conj(c) if dtypes.is_complex(c.dtype) else c)
            again = _with_values(frozen, residuals)
            grads = _call_backward(cls, again, full, metas, shapes)
            arrays = [None if grads[i] is None else state.read(grads[i]) for i in carry_in]
        if capture.before:
            raise CaptureError(
                f"{cls.__name__}.backward uses a Tensor that is neither saved in ctx nor made there; save_for_backward "
                "it"
            )
        filled = [
            jnp.zeros(*shapes[i]) if a is None else jnp.conj(a) if dtypes.is_complex(a.dtype) else a
            for i, a in zip(carry_in, arrays, strict=True)
        ]
        return filled, None, None

    joined.defvjp(forward, backward)
    done = joined([inputs[i] for i in carry_in], [outputs[i] for i in carry_out], residuals)
    found = list(outputs)
    for i, array in zip(carry_out, done, strict=True):
        found[i] = array
    return found


def _with_values(ctx: PyLayerContext, residuals: tuple) -> PyLayerContext:
    """ctx with these arrays as its saved Tensors and Tensor attributes."""
    again = copy.copy(ctx)
    arrays = iter(residuals[0])
    again._packed = None
    again._saved = [None if entry is None else [next(arrays), None] for entry in ctx._saved]
    for name, array in residuals[1].items():
        setattr(again, name, Tensor(array))
    return again


def _link(array: Any, edge: Any) -> Tensor:
    """A Tensor of this value whose gradient goes to edge."""
    tensor = Tensor(array, stop_gradient=edge is None)
    if isinstance(edge, tuple):
        tensor._node, tensor._index = edge
    elif edge is not None:
        tensor._node = tape.PassNode("saved", edge)
    return tensor


def _is_tensor(x: Any) -> bool:
    return isinstance(x, TensorState)
