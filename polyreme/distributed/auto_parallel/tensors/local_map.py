"""local_map: a function written for one device's part of Tensors, run on every device of a mesh at once.

The function is traced once, under jax.shard_map, and becomes one kernel on the whole values, so that it is
taped and differentiated like any op; see also communication/local_body.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from polyreme.core import amp_policy, rng, state
from polyreme.core import dtype as dtypes
from polyreme.core.kernel import Kernel
from polyreme.core.sharding_rule import OpCall
from polyreme.core.state import TensorState, Tracer
from polyreme.distributed.auto_parallel.tensors.form import Form
from polyreme.distributed.auto_parallel.tensors.kept import form_of
from polyreme.distributed.auto_parallel.tensors.kernel import DistKernel
from polyreme.distributed.auto_parallel.tensors.mode import run_kernel
from polyreme.distributed.auto_parallel.tensors.placements import Placement, Replicate, checked
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh
from polyreme.distributed.auto_parallel.tensors.reshard import reshard
from polyreme.distributed.communication.group import axis_group
from polyreme.distributed.communication.local_body import LocalBody, inside
from polyreme.eager import tape
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ConfigError, PlacementError
from polyreme.jit.capture import Capture, capture_in_progress, same_parts, watching
from polyreme.jit.convert import converted
from polyreme.jit.structure import Spec, flatten, rebuild

Placed = Sequence[Placement] | None


def local_map(
    func: Callable[..., Any],
    out_placements: Sequence[Placed],
    in_placements: Sequence[Placed] | None = None,
    process_mesh: ProcessMesh | None = None,
    reshard_inputs: bool = False,
) -> Callable[..., Any]:
    """func, applied on each device to its own parts of Tensors on a mesh; what it returns are parts of the results.

    out_placements: for each value returned, its placements, which say how parts make up the whole (None for one that is
    no Tensor). in_placements: for each Tensor given, the placements func expects, None for a dense one; by default as
    they come. process_mesh: by default that of the inputs. reshard_inputs: bring inputs into in_placements rather than
    raise PlacementError. Dense Tensors are given whole, and so are Tensors that func reads from outside.

    func is traced once for all devices: `get_rank()` in it is a Tensor, and collectives act on local values. Parts
    must be of equal shape. Gradients are those of the function from whole values to whole values. Raises ConfigError
    without a mesh or with another number of placements than of values, PlacementError for placements that differ or
    uneven parts, CaptureError if func writes to a Tensor from outside.

    >>> from polyreme.distributed import Partial, ProcessMesh, Shard, shard_tensor
    >>> mesh = ProcessMesh([0, 1], dim_names=["x"])
    >>> x = shard_tensor([[1.0, 2.0], [3.0, 4.0]], mesh, [Shard(0)])
    >>> local_map(lambda v: v.sum(), out_placements=[[Partial()]])(x).item()
    10.0
    """
    known: dict[Any, list[_Mapped]] = {}

    @functools.wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves: list[Any] = []
        spec = flatten((args, kwargs), leaves)
        arguments = _localize(leaves, in_placements, process_mesh, reshard_inputs)
        tensors = [leaf for leaf in arguments if isinstance(leaf, Tensor)]
        mesh = _mesh(tensors, process_mesh)
        key = _key(spec, arguments, mesh)
        found = next((m for m in known.get(key, []) if m.serves()), None)
        if found is None:
            found = _Mapped(func, spec, arguments, mesh, out_placements)
            known.setdefault(key, []).append(found)
        return found.run(tensors)

    return run


def _localize(
    leaves: Sequence[Any], in_placements: Sequence[Placed] | None, mesh: ProcessMesh | None, may_move: bool
) -> list[Any]:
    """The inputs as func expects them."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if in_placements is not None and len(in_placements) != len(tensors):
        raise ConfigError(f"local_map: in_placements has {len(in_placements)} entries for {len(tensors)} Tensors")
    wanted = iter([None] * len(tensors) if in_placements is None else in_placements)
    return [_move_to(leaf, next(wanted), mesh, may_move) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _move_to(tensor: Tensor, placements: Placed, mesh: ProcessMesh | None, may_move: bool) -> Tensor:
    form = form_of(tensor)
    if placements is None:
        return tensor
    if form is None:
        if isinstance(placements, (list, tuple)) and all(isinstance(p, Replicate) for p in placements):
            return tensor
        raise PlacementError(
            f"local_map: an input of shape {list(tensor.shape)} is dense, and is given whole; in_placements says "
            f"{placements}: put it on the mesh with shard_tensor, or say None"
        )
    full = checked("local_map", placements, form.mesh, form.shape)
    if full == form.placements and (mesh is None or mesh == form.mesh):
        return tensor
    if not may_move:
        wanted = f"in_placements says {list(full)}" if full != form.placements else f"process_mesh is {mesh}"
        raise PlacementError(
            f"local_map: an input of shape {list(form.shape)} lies as {list(form.placements)} on {form.mesh}, "
            f"{wanted}; reshard it, or pass reshard_inputs=True"
        )
    return reshard(tensor, form.mesh if mesh is None else mesh, full)


def _mesh(tensors: Sequence[Tensor], given: ProcessMesh | None) -> ProcessMesh:
    found = [f.mesh for f in map(form_of, tensors) if f is not None]
    mesh = given if given is not None else found[0] if found else None
    if mesh is None:
        raise ConfigError("local_map: no input lies on a mesh; give process_mesh")
    other = next((m for m in found if m != mesh), None)
    if other is not None:
        raise PlacementError(f"local_map: inputs lie on {other}, and not all on {mesh}; reshard them to one mesh")
    return mesh


def _key(spec: Spec, arguments: Sequence[Any], mesh: ProcessMesh) -> Any:
    arguments_key = tuple(
        (form_of(v), tuple(v.shape), v.dtype, v.stop_gradient)
        if isinstance(v, Tensor)
        else (type(v), v if isinstance(v, Hashable) else id(v))
        for v in arguments
    )
    modes = (amp_policy.active.policy, tape.grad_mode.enabled, dtypes.default_dtype())
    return spec, arguments_key, mesh, tuple(mesh.dim_names), modes


@dataclass
class _Traced:
    """Record of one run of the function: the Tensors from outside that it reads, whether it draws random numbers, the
    Layers it calls, what it returns, and which results want a gradient."""

    outside: list[TensorState] = field(default_factory=list)
    draws: bool = False
    layers: tuple = ()
    spec: Any = None
    plain: list[Any] = field(default_factory=list)
    wants: list[bool] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)


class _Mapped:
    """The function traced for one structure of inputs."""

    def __init__(
        self, func: Callable[..., Any], spec: Spec, given: Sequence[Any], mesh: ProcessMesh, placed: Sequence[Placed]
    ) -> None:
        self.func, self.spec, self.arguments, self.mesh, self.placed = func, spec, list(given), mesh, placed
        self.modes: Any = (amp_policy.active.policy, tape.grad_mode.enabled, dtypes.default_dtype())
        tensors = [v for v in given if isinstance(v, Tensor)]
        self.flags = [t.stop_gradient for t in tensors]
        self.forms = [form_of(t) for t in tensors]
        self.shapes = [tuple(t.shape) for t in tensors]
        for form in self.forms:
            _check_even(form)
        # the group is made once: each has a number of its own
        self.body = LocalBody(mesh.jax_mesh, mesh.mesh, axis_group(mesh.jax_mesh, mesh.dim_names))
        self.traced = _Traced()
        self.holder = rng.default_generator.key_state()
        self._discover(tensors)
        self.outs = self._out_forms()
        self.kernel = self._trace()

    def serves(self) -> bool:
        """True if the Layers that were called are as they were."""
        return all(la.training is t and same_parts(la, p) for la, t, p in self.traced.layers)

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """The results for inputs like those it was traced for."""
        every = [*tensors, *self.traced.outside]
        results = run_kernel(self.kernel, every, self.outs)
        arrays = iter(results)
        if self.traced.draws:
            _move_on(self.holder, state.read(results[-1]))
        built = []
        wants = iter(self.traced.wants)
        for leaf in self.traced.plain:
            if leaf is not _TENSOR:
                built.append(leaf)
                continue
            out = next(arrays)
            if not next(wants):
                out.stop_gradient, out._node = True, None
            built.append(out)
        return rebuild(self.traced.spec, iter(built))

    # tracing

    def _discover(self, tensors: Sequence[Tensor]) -> None:
        """Run the function on shapes alone."""

        def abstract(*stored: Any) -> Any:
            capture = Capture(capture_in_progress(), detach=True, converted=converted)
            return self._mapped(capture, stored, [], learn=True)

        arrays = [
            jax.ShapeDtypeStruct(_kept_shape(f, s), t.dtype)
            for f, s, t in zip(self.forms, self.shapes, tensors, strict=True)
        ]
        jax.eval_shape(abstract, *arrays)

    def _mapped(self, capture: Capture, stored: Sequence[Any], outside: Sequence[Any], learn: bool = False) -> tuple:
        """The function under shard_map, on what is kept of the inputs: -> what is kept of the results."""

        def body(arrays: Sequence[Any], held: Sequence[Any]) -> list[Any]:
            with self._as_traced(), watching(capture), inside(self.body):
                for tensor, array in zip(self.traced.outside, held, strict=False):
                    capture.touch(tensor)
                    tensor._array = array
                return self._call(capture, arrays, learn)

        specs = [PartitionSpec() if f is None else f.spec for f in self.forms]
        whole = [PartitionSpec()] * len(outside)
        out_specs: Any = PartitionSpec() if learn else [f.spec for f in self.outs]
        run = jax.shard_map(
            body, mesh=self.mesh.jax_mesh, in_specs=(specs, whole), out_specs=out_specs, check_vma=False
        )  # fmt: skip
        return tuple(run(list(stored), list(outside)))

    @contextmanager
    def _as_traced(self) -> Iterator[None]:
        """The modes of the first run: jax runs the function again in a backward, when others are in force."""
        now = (amp_policy.active.policy, tape.grad_mode.enabled, dtypes.default_dtype())
        amp_policy.active.policy, tape.grad_mode.enabled = self.modes[:2]
        dtypes.set_default_dtype(self.modes[2])
        try:
            yield
        finally:
            amp_policy.active.policy, tape.grad_mode.enabled = now[:2]
            dtypes.set_default_dtype(now[2])

    def _call(self, capture: Capture, given: Sequence[Any], learn: bool) -> list[Any]:
        arrays = iter(given)
        tensors = []
        for array, form, flag in zip(arrays, self.forms, self.flags, strict=True):
            local = array if form is None else array.reshape(form.local_shape(self.mesh.here))
            tensors.append(Tensor(local, stop_gradient=flag))
        waiting = iter(tensors)
        leaves = [next(waiting) if isinstance(v, Tensor) else v for v in self.arguments]
        args, kwargs = rebuild(self.spec, iter(leaves))
        outs: list[Any] = []
        spec = flatten(converted(self.func)(*args, **kwargs), outs)
        results = [capture.read(v) for v in outs if isinstance(v, TensorState)]
        if learn:
            self._learn(capture, spec, outs, results)
            return results
        if self.traced.draws:
            results.append(self.holder._array)
        return [_room(a, f) for a, f in zip(results, self.outs, strict=True)]

    def _learn(self, capture: Capture, spec: Spec, outs: Sequence[Any], arrays: Sequence[Any]) -> None:
        traced = self.traced
        traced.spec = spec
        traced.plain = [_TENSOR if isinstance(v, TensorState) else v for v in outs]
        traced.wants = [not v.stop_gradient for v in outs if isinstance(v, TensorState)]
        traced.shapes = [tuple(a.shape) for a in arrays]
        traced.layers = tuple(capture.layers.values())
        for before in capture.before.values():
            if before.tensor is self.holder:
                traced.draws = before.written
            elif before.written or before.regraded:
                raise CaptureError(
                    f"local_map: the function changes a Tensor of shape {list(before.tensor._array.shape)} from "
                    "outside, of which each device would make another value; return it instead"
                )
            form = form_of(before.tensor) if isinstance(before.tensor, Tensor) else None
            if form is not None and not all(p.is_replicated() for p in form.placements):
                raise PlacementError(
                    f"local_map: the function reads a Tensor from outside that lies as {list(form.placements)}; pass "
                    "it as an argument, so that each device gets its part"
                )
            traced.outside.append(before.tensor)

    def _out_forms(self) -> list[Form]:
        shapes = self.traced.shapes
        tensors = [p for p, leaf in zip(self.placed, self.traced.plain, strict=False) if leaf is _TENSOR]
        if len(self.placed) != len(self.traced.plain) or None in tensors:
            raise ConfigError(
                f"local_map: out_placements has {len(self.placed)} entries, {sum(p is not None for p in self.placed)} "
                f"of them placements, for {len(self.traced.plain)} values, {len(shapes)} of them Tensors; give one "
                "list of placements for each Tensor returned, such as [[Shard(0)]] for one, and None for other values"
            )
        forms = [_grown(p, s, self.mesh) for p, s in zip(tensors, shapes, strict=True) if p is not None]
        if self.traced.draws:
            forms.append(_grown([], tuple(self.holder._array.shape), self.mesh))
        return forms

    def _trace(self) -> DistKernel:
        count = len(self.forms)

        def saved(*stored: Any) -> tuple:
            capture = Capture(capture_in_progress(), detach=True, converted=converted)
            return self._mapped(capture, stored[:count], stored[count:])

        forms = [*self.forms, *map(_form_or_none, self.traced.outside)]

        def whole(*values: Any) -> tuple:
            stored = [v if f is None else f.encode(v) for v, f in zip(values, forms, strict=True)]
            return tuple(f.decode(o) for f, o in zip(self.outs, saved(*stored), strict=True))

        name = getattr(self.func, "__name__", "local_map")
        shapes = (*self.shapes, *(tuple(t._array.shape) for t in self.traced.outside))
        call = OpCall(name, (), shapes, (), {}, (), ())
        return DistKernel.of(Kernel(whole, name), saved, call, forms, self.mesh, self.outs)


_TENSOR = object()


def _form_or_none(tensor: Any) -> Form | None:
    return form_of(tensor) if isinstance(tensor, Tensor) else None


def _kept_shape(form: Form | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if form is None else form.stored_shape


def _check_even(form: Form | None) -> None:
    if form is None:
        return
    for dim, size in enumerate(form.shape):
        if size != form.rows(dim) * form.ways(dim) * form.factor(dim):
            raise PlacementError(
                f"local_map: dim {dim} of an input of shape {list(form.shape)} is split unevenly over "
                f"{form.ways(dim)} devices, and one program serves all: pad it to a multiple, or reshard it"
            )


def _grown(placements: Sequence[Placement], shape: tuple[int, ...], mesh: ProcessMesh) -> Form:
    """The form of a whole whose parts have this shape."""
    own = Form(mesh, checked("local_map: out_placements", placements, mesh, shape), shape)
    return Form(mesh, own.placements, tuple(n * own.ways(d) for d, n in enumerate(shape)))


def _room(local: Any, form: Form) -> Any:
    """A part as it stands in what is kept of the whole."""
    return local.reshape(form.sharding.shard_shape(form.stored_shape))


def _move_on(holder: TensorState, key: Any) -> None:
    """Write the key that the function left; a random generator stays where it was."""
    now = holder._array
    if not isinstance(key, Tracer):
        key = put(key, now.sharding) if now.committed else jnp.asarray(np.asarray(key))
    state.write(holder, key)
