"""The mode that runs ops on Tensors that lie on a mesh; all other calls go to the mode under it.

It is put in force when the first such Tensor is made, so that programs without one pay nothing. In
a captured function the ops run on values as always, and results are told where they lie.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from polyreme.core import amp_policy, mode, rng, state
from polyreme.core import dtype as dtypes
from polyreme.core.checked import checked, floats_in, layer_here, raise_late
from polyreme.core.engine.turns import turns
from polyreme.core.kernel import Kernel, Mask
from polyreme.core.meshes import devices_of
from polyreme.core.op import ATTR, KEY, TENSORS, Op
from polyreme.core.sharding_rule import OpCall, ShardingRule, as_laid_out
from polyreme.core.state import TensorState, Tracer
from polyreme.distributed.auto_parallel.dims.derived import derived_rule, unknown_primitives
from polyreme.distributed.auto_parallel.tensors.form import Form
from polyreme.distributed.auto_parallel.tensors.kept import encoded, form_of, in_form, note, stored_of
from polyreme.distributed.auto_parallel.tensors.kernel import DistKernel
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh
from polyreme.distributed.auto_parallel.tensors.reshard import leaf_or_edge, moved_array
from polyreme.distributed.auto_parallel.tensors.rules import propagate
from polyreme.eager import tape
from polyreme.eager.checked import look
from polyreme.eager.dispatch import constant, rebind_each
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.errors import PlacementError

_log = logging.getLogger("polyreme.distributed.auto_parallel")


class DistMode:
    """Runs ops with a Tensor on a mesh among their inputs."""

    def __init__(self, under: mode.Mode) -> None:
        self.under = under
        self.kernels: dict[Any, DistKernel] = {}
        self.derived: dict[Any, ShardingRule | None] = {}
        self.logged: set[str] = set()

    def run(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the op."""
        watching = state.watch.active
        recording = watching is not None and watching.records
        if recording or not (_any_dist(args) or (kwargs and _any_dist(kwargs.values()))):
            return self.under.run(op, args, kwargs)
        if watching is not None:
            return self._captured(op, args, kwargs)
        if not checked.is_on:
            return self._eager(op, args, kwargs)
        raise_late()
        given, layer = floats_in([*args, *kwargs.values()]), layer_here()
        result = self._eager(op, args, kwargs)
        look(op.name, result, given, layer)
        return result

    # now

    def _eager(self, op: Op, args: tuple, kwargs: dict[str, Any]) -> Any:
        out = kwargs.pop("out", None)
        bound = BoundCall(op, args, kwargs)
        mesh = bound.mesh()
        arrays = [a if f is not None else _beside(a, mesh) for a, f in zip(bound.arrays, bound.forms, strict=True)]
        shapes = tuple((a.dtype, bool(getattr(a, "weak_type", False)), a.shape) for a in arrays)
        key = (op, *bound.key, tuple(bound.forms), tuple(mesh.dim_names), shapes)
        kernel = self.kernels.get(key)
        if kernel is None:
            kernel = self.kernels[key] = self._kernel(bound, arrays, mesh)
        results = _run(kernel, arrays, bound.tensors, mesh)
        made = results[0] if kernel.many is None else kernel.many(results)
        return made if out is None else rebind_each(out, made, op.name, retype=True)

    # later

    def _captured(self, op: Op, args: tuple, kwargs: dict[str, Any]) -> Any:
        arguments = dict(kwargs)
        result = self.under.run(op, args, kwargs)
        arguments.pop("out", None)
        arguments.pop("name", None)
        if op.rule is as_laid_out:
            return result
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        bound = BoundCall(op, args, arguments, values=True)
        mesh = bound.mesh()
        call = bound.call([(tuple(t._array.shape), t._array.dtype) for t in results])
        rule = self.rule(bound, call)
        if rule is not None:
            for tensor, form in zip(results, propagate(rule, bound.forms, call, mesh).outs, strict=True):
                _note(tensor, form)
        return result

    # rules

    def _kernel(self, bound: BoundCall, arrays: Sequence[Any], mesh: ProcessMesh) -> DistKernel:
        base: Kernel = bound.op.kernel(bound.template, amp_policy.active.policy)
        outs = jax.eval_shape(base.fn, *_structs(bound, arrays))
        listed = list(outs) if isinstance(outs, (tuple, list)) else [outs]
        call = bound.call([(tuple(o.shape), o.dtype) for o in listed])
        kernel = DistKernel(base, self.rule(bound, call), call, bound.forms, mesh)
        kernel.many = type(outs) if isinstance(outs, (tuple, list)) else None
        return kernel

    def rule(self, bound: BoundCall, call: OpCall) -> ShardingRule | None:
        """The sharding rule of a call: the declared one, or, where none describes it, what the op's function tells.

        None for an op whose result lies as it says itself, and for one of which nothing is known: said once.
        """
        op = bound.op
        declared = None if op.rule is None else op.rule(call)
        if declared is not None or op.rule is as_laid_out:
            return declared
        key = (op, *bound.key, call.shapes, call.dtypes)
        if key not in self.derived:
            self.derived[key] = self._derived(bound)
        return self.derived[key]

    def _derived(self, bound: BoundCall) -> ShardingRule | None:
        op = bound.op
        if bound.lacks_key:
            why = "what it draws is not known in captured code"
        else:
            fn = op.kernel(bound.template, amp_policy.active.policy).fn
            jaxpr = jax.make_jaxpr(fn)(*_structs(bound, bound.arrays))
            rule = derived_rule(jaxpr)
            if rule is not None:
                return rule
            why = f"nothing is known of the dims of {', '.join(unknown_primitives(jaxpr))}"
        if op.name not in self.logged:
            self.logged.add(op.name)
            _log.info(
                "%s has no sharding rule (%s): addends are joined before it, and its results lie as XLA leaves them; "
                "declare it with rule=, or sharding= of register_op",
                op.name,
                why,
            )
        return None


def _structs(bound: BoundCall, arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Shape and dtype of the value of each input."""
    return [
        jax.ShapeDtypeStruct(a.shape if f is None else f.shape, a.dtype, weak_type=bool(getattr(a, "weak_type", False)))
        for a, f in zip(arrays, bound.forms, strict=True)
    ]


def _run(kernel: DistKernel, arrays: Sequence[Any], tensors: Sequence[Any], mesh: ProcessMesh) -> list[Any]:
    """The results, taped if some input wants a gradient."""
    outs = turns.end(kernel.forward(*arrays))
    forms = kernel.outs if kernel.outs is not None else [None] * len(outs)
    results = [_result(o, f, mesh) for o, f in zip(outs, forms, strict=True)]
    edges = tuple(_edge(t) for t in tensors)
    if tape.grad_mode.enabled and not kernel.base.constant and any(e is not None for e in edges):
        _tape(kernel, tuple(arrays), edges, results, [_layout_of(t) for t in tensors])
    return results


def run_kernel(kernel: DistKernel, tensors: Sequence[Any], outs: Sequence[Form]) -> list[Any]:
    """Results of a kernel that is no op's, on Tensors that lie as it was made for; in a captured function too."""
    if state.watch.active is None:
        forms = kernel.forms
        arrays = [
            _beside(state.read(t), kernel.mesh) if f is None else stored_of(t)
            for t, f in zip(tensors, forms, strict=True)
        ]
        return _run(kernel, arrays, tensors, kernel.mesh)
    edges = tuple(tape.edge_of(t) for t in tensors)
    results = list(tape.apply(kernel.base, tuple(state.read(t) for t in tensors), edges))
    for tensor, form in zip(results, outs, strict=True):
        _note(tensor, form)
    return results


def _note(tensor: Any, form: Form) -> None:
    """Say of a Tensor in a captured function how it lies; dims that are split are told to the compiler."""
    note(tensor, form)
    array = tensor._array
    entries = tuple(form.joined().spec)
    if not isinstance(array, Tracer) or not form.joined().plain or all(e is None for e in entries):
        return
    open_ = PartitionSpec(*(PartitionSpec.UNCONSTRAINED if e is None else e for e in entries))
    tensor._array = jax.lax.with_sharding_constraint(array, NamedSharding(form.mesh.jax_mesh, open_))


def _any_dist(values: Any) -> bool:
    for value in values:
        if isinstance(value, Tensor):
            if form_of(value) is not None:
                return True
        elif (value.__class__ is list or value.__class__ is tuple) and _any_dist(value):
            return True
    return False


class BoundCall:
    """A call's inputs apart: tensors (or what stands for them) with their arrays, forms and parameters, and the rest.

    values: take values, not what is kept.
    """

    drawn: bool
    lacks_key: bool
    template: tuple[Any, ...]

    def __init__(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], values: bool = False) -> None:
        kwargs.pop("name", None)
        self.op = op
        self.tensors: list[Any] = []
        self.arrays: list[Any] = []
        self.forms: list[Form | None] = []
        self.params: list[str] = []
        self.attrs: dict[str, Any] = {}
        self.drawn = self.lacks_key = False
        self._values = values
        template: list[Any] = []
        types: list[Any] = []
        for name, kind, value in zip(op.names, op.kinds, op.bind(args, kwargs), strict=True):
            template.append(self._slot(name, kind, value, types))
        self.template = tuple(template)
        policy = amp_policy.active.policy
        self.key = (policy, dtypes.default.dtype, self.template, tuple(types))

    def _slot(self, name: str, kind: str, value: Any, types: list[Any]) -> Any:
        if kind is ATTR:
            frozen = self.attrs[name] = self.op.attribute(self.op.index[name], value)
            types.append(_types(frozen))
            return (frozen,)
        if kind is TENSORS:
            if isinstance(value, TensorState) or not isinstance(value, (list, tuple)):
                raise TypeError(f"{self.op.name} takes a list of Tensors, got {type(value).__name__}")
            for item in value:
                self._take(name, item)
            return len(value)
        if kind is KEY:
            self.drawn = True
            drawn = value is inspect.Parameter.empty or value is None
            self.lacks_key = self._values and drawn
            if not self.lacks_key:
                self._take(name, rng.default_generator.next_key() if drawn else value)
            return -1
        if value is None:
            return (None,)
        self._take(name, value)
        return -1

    def _take(self, name: str, value: Any) -> None:
        tensor = isinstance(value, TensorState)
        form = form_of(value) if isinstance(value, Tensor) else None
        if tensor:
            array = stored_of(value) if form is not None and not self._values else state.read(value)
        else:
            array = constant(value)
        self.tensors.append(value if tensor else None)
        self.arrays.append(array)
        self.forms.append(form)
        self.params.append(name)

    def mesh(self) -> ProcessMesh:
        """The one mesh of the inputs. PlacementError if they lie on several."""
        meshes = [f.mesh for f in self.forms if f is not None]
        other = next((m for m in meshes if m != meshes[0]), None)
        if other is not None:
            raise PlacementError(
                f"{self.op.name}: inputs lie on different meshes, {meshes[0]} and {other}; reshard them to one"
            )
        return meshes[0]

    def call(self, outs: Sequence[tuple[tuple[int, ...], Any]]) -> OpCall:
        """The call as rules see it; outs: shape and dtype of each result."""
        shapes = tuple(
            f.shape if f is not None else tuple(a.shape) for a, f in zip(self.arrays, self.forms, strict=True)
        )
        return OpCall(
            self.op.name,
            tuple(self.params),
            shapes,
            tuple(a.dtype for a in self.arrays),
            self.attrs,
            tuple(s for s, _ in outs),
            tuple(d for _, d in outs),
            self.drawn,
        )


def _types(value: Any) -> Any:
    return tuple(_types(v) for v in value) if isinstance(value, tuple) else value.__class__


def _beside(array: Any, mesh: ProcessMesh) -> Any:
    """A dense array where a program over the mesh can read it."""
    if isinstance(array, Tracer) or not devices_of(array):
        return array
    return put(array, NamedSharding(mesh.jax_mesh, PartitionSpec()))


def _result(array: Any, form: Form | None, mesh: ProcessMesh) -> Any:
    if form is not None:
        return in_form(array, form)
    if not isinstance(array.sharding, NamedSharding):
        array = put(array, NamedSharding(mesh.jax_mesh, PartitionSpec()))
    return Tensor(array)


def _edge(tensor: Any) -> Any:
    if tensor is None or tensor.stop_gradient:
        return None
    if tensor.own_form:
        return leaf_or_edge(tensor) if dtypes.is_inexact(tensor.dtype) else None
    return tape.edge_of(tensor)


def _layout_of(tensor: Any) -> Any:
    """The placement of a dense input, for its gradient to return to; None if it may be anywhere, or is on a mesh."""
    if tensor is None or (isinstance(tensor, Tensor) and form_of(tensor) is not None):
        return None
    return tensor._array.sharding if tensor._array.committed else None


def _tape(kernel: DistKernel, arrays: tuple, edges: tuple, results: Sequence[Any], lies: list[Any]) -> None:
    carried = [t for t in results if dtypes.is_inexact(t.dtype)]
    if not carried:
        return
    forms = [form_of(t) for t in carried]
    node = DistNode(kernel, arrays, edges, [f.joined() for f in forms if f is not None], lies)
    for at, tensor in enumerate(carried):
        tensor.stop_gradient, tensor._node, tensor._index = False, node, at


class DistNode(tape.Node):
    """A taped call on Tensors that lie on a mesh; its gradients lie as its inputs do."""

    cots: list[Form]
    kernel: DistKernel
    lies: list[Any]
    num_outputs: int

    __slots__ = ("arrays", "cots", "kernel", "lies", "num_outputs")
    known_to_jax: ClassVar[bool] = False

    def __init__(
        self, kernel: DistKernel, arrays: tuple[Any, ...], edges: tuple[Any, ...], cots: list[Form], lies: list[Any]
    ) -> None:
        super().__init__(kernel.base.name, edges)
        self.kernel, self.cots, self.lies = kernel, cots, lies
        self.arrays: Any = arrays if tape.saved_hooks.pair is None else tape.Packed(arrays)
        self.num_outputs = len(cots)

    def gradients(self, cotangents: list[Any], create_graph: bool) -> list[Any]:
        """Gradients for the inputs that want one, Partial where they are sums that no device has yet."""
        if self.arrays is None:
            raise tape.freed_error(self.name)
        arrays = self.arrays.arrays() if isinstance(self.arrays, tape.Packed) else self.arrays
        mask = tuple(e is not None for e in self.edges)
        if create_graph:
            return self._again(arrays, cotangents, mask)
        present = tuple(c is not None for c in cotangents)
        given = tuple(_keep_as(c, f) for c, f in zip(cotangents, self.cots, strict=True) if c is not None)
        cots = [f for f, p in zip(self.cots, present, strict=True) if p]
        run, forms = self.kernel.backward(mask, present, cots)
        found = iter(zip(turns.end(run(arrays, given)), forms, strict=True))
        return [self._gradient(*next(found), at) if m else None for at, m in enumerate(mask)]

    def _gradient(self, array: Any, form: Form, at: int) -> Any:
        where = self.lies[at]
        return in_form(array, form) if where is None else Tensor(put(array, where))

    def _again(self, arrays: tuple, cotangents: list, mask: Mask) -> list:
        """Gradients that are taped themselves, on values."""
        present = tuple(c is not None for c in cotangents)
        given = [c for c in cotangents if c is not None]
        kernel = self.kernel.base.grad_kernel(mask, present)
        primals = jax.jit(lambda *a: tuple(self.kernel.values(a)))(*arrays)
        edges = (*self.edges, *(_edge(c) for c in given))
        cots = [_beside(c._array, self.kernel.mesh) for c in given]
        found = iter(tape.apply(kernel, (*primals, *cots), edges))
        return [next(found) if m else None for m in mask]

    def release(self) -> None:
        self.arrays = None

    def saved(self) -> list[Any]:
        """The stored arrays of the inputs."""
        return list(self.arrays.arrays() if isinstance(self.arrays, tape.Packed) else self.arrays)

    def reload(self, arrays: Sequence[Any]) -> None:
        """Other values for the same call."""
        self.arrays = tuple(arrays)

    @property
    def freed(self) -> bool:
        return self.arrays is None


def _keep_as(tensor: Any, form: Form) -> Any:
    """The stored array, in the given form, of a Tensor that lies anywhere."""
    have = form_of(tensor)
    if have is None:
        return encoded(state.read(tensor), form)
    return stored_of(tensor) if have == form else moved_array(stored_of(tensor), have, form)


def install() -> None:
    """Put the mode in force, around whatever runs ops now."""
    mode.current.settle(around=DistMode)
