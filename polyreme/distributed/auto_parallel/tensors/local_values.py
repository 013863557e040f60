"""Tensors on a mesh made of the devices' own parts, and taken apart into them.

One process drives all devices, so it has every device's part at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from polyreme.core import state
from polyreme.distributed.auto_parallel.tensors.form import Form
from polyreme.distributed.auto_parallel.tensors.kept import form_of, in_form
from polyreme.distributed.auto_parallel.tensors.placements import Placement, checked
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh
from polyreme.distributed.auto_parallel.tensors.reshard import brought, form_for, reshard
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ConfigError, DTypeError, PlacementError, ShapeError


def dtensor_from_local(
    local_tensor: Tensor | Sequence[Tensor], mesh: ProcessMesh, placements: Sequence[Placement]
) -> Tensor:
    """The Tensor on a mesh whose parts these are: no value is moved between devices or changed.

    local_tensor: a list with the part of each process id of the mesh, in its order, or one Tensor that is every
    device's part. Sizes of a split dim add up. Gradients flow back to the parts. Raises ShapeError for parts that make
    no whole, DTypeError for parts of several dtypes, ConfigError for another number of parts than of devices.

    >>> from polyreme.distributed import Partial, ProcessMesh, Shard
    >>> mesh = ProcessMesh([0, 1], dim_names=["x"])
    >>> parts = [paddle.to_tensor([1.0]), paddle.to_tensor([2.0])]
    >>> dtensor_from_local(parts, mesh, [Shard(0)]).tolist(), dtensor_from_local(parts, mesh, [Partial()]).tolist()
    ([1.0, 2.0], [3.0])
    """
    _refuse_captured("dtensor_from_local")
    alike = not isinstance(local_tensor, (list, tuple))
    ids = form_for("dtensor_from_local", mesh, [], ()).mesh.process_ids
    given: Any = local_tensor
    parts = [given] * len(ids) if alike else list(given)
    if len(parts) != len(ids):
        raise ConfigError(f"dtensor_from_local: {len(parts)} parts for the {len(ids)} devices of {mesh}")
    for part in parts:
        if not isinstance(part, Tensor):
            raise TypeError(f"dtensor_from_local takes a Tensor, or a list of them, got {type(part).__name__}")
    found = sorted({str(part.dtype) for part in parts})
    if len(found) > 1:
        raise DTypeError(f"dtensor_from_local: parts of one whole are of {', '.join(found)}; cast them to one dtype")
    form = _global_form(parts, mesh, placements)
    by_id = dict(zip(ids, parts, strict=True))
    for pid, part in by_id.items():
        if tuple(part.shape) != form.local_shape(pid):
            raise ShapeError(
                f"dtensor_from_local: process id {pid} has a part of shape {list(part.shape)}, but its part of {form} "
                f"has shape {list(form.local_shape(pid))}; the first devices have ceil(n / k) rows"
            )
    stored = form.from_local(lambda pid: state.host(by_id[pid], "dtensor_from_local"), parts[0].dtype)
    result = in_form(stored, form)
    used = {pid: part for pid, part in by_id.items() if _first(form, pid)} if alike else by_id
    wanting = {pid: part for pid, part in used.items() if not part.stop_gradient}
    if wanting and tape.grad_mode.enabled:
        result.stop_gradient, result._node, result._index = False, FromParts(form, wanting), 0
    return result


def _global_form(parts: Sequence[Tensor], mesh: ProcessMesh, placements: Sequence[Placement]) -> Form:
    """The form of the whole: the sizes along the mesh dims that split a dim add up."""
    own = tuple(parts[0].shape)
    local = Form(mesh, checked("dtensor_from_local", placements, mesh, own), own)
    shape = []
    for dim, size in enumerate(own):
        axes = local.axes(dim)
        line = [i for i, pid in enumerate(mesh.process_ids) if not any(np.delete(local.coordinates(pid), axes))]
        shape.append(sum(parts[i].shape[dim] for i in line) if axes else size)
    return Form(mesh, local.placements, tuple(shape))


def _first(form: Form, pid: int) -> bool:
    """Whether a device is the first of those that hold the same piece."""
    return not any(c for c, p in zip(form.coordinates(pid), form.placements, strict=True) if p.is_replicated())


def dtensor_to_local(
    dist_tensor: Tensor, mesh: ProcessMesh | None = None, placements: Sequence[Placement] | None = None
) -> Tensor:
    """The part on this process's first device of the mesh, as a dense Tensor; gradients flow back to that part.

    mesh, placements: where the Tensor is brought first, if it does not lie so. Raises PlacementError for a dense one.
    """
    _refuse_captured("dtensor_to_local")
    if not isinstance(dist_tensor, Tensor):
        raise TypeError(f"dtensor_to_local takes a Tensor, got {type(dist_tensor).__name__}")
    have = form_of(dist_tensor)
    if have is None:
        raise PlacementError("dtensor_to_local: this Tensor lies on no ProcessMesh; shard_tensor puts it on one")
    if mesh is not None or placements is not None:
        to = list(have.placements) if placements is None else placements
        dist_tensor = reshard(dist_tensor, have.mesh if mesh is None else mesh, to)
    form = form_of(dist_tensor)
    assert form is not None
    # a buffer of its own on the default device, where dense Tensors are
    result = Tensor(jnp.asarray(dist_tensor._local_value().numpy()))
    if not dist_tensor.stop_gradient and tape.grad_mode.enabled:
        result.stop_gradient, result._node, result._index = False, ToPart(form, dist_tensor), 0
    return result


def _refuse_captured(what: str) -> None:
    if state.capturing():
        raise CaptureError(f"{what} inside a captured function, where parts have no values; use local_map")


class _Parts(tape.UnsavedNode):
    """Between a whole and its parts."""

    __slots__ = ("form",)

    def __init__(self, name: str, form: Form, edges: tuple) -> None:
        super().__init__(name, edges)
        self.form = form


class FromParts(_Parts):
    """A whole made of parts: each part's gradient is its part of the whole's."""

    ids: list[int]

    __slots__ = ("ids",)

    def __init__(self, form: Form, parts: dict[int, Tensor]) -> None:
        super().__init__("dtensor_from_local", form.joined(), tuple(tape.edge_of(p) for p in parts.values()))
        self.ids = list(parts)

    def gradients(self, cotangents: list[Any], create_graph: bool) -> list[Any]:
        """On the default device, as the parts are."""
        with tape.GradEnabled(False):
            whole = brought(cotangents[0], self.form)
        return [Tensor(jnp.asarray(whole._local_value(pid).numpy())) for pid in self.ids]


class ToPart(_Parts):
    """A part taken of a whole: the whole's gradient is the part's there, and zero elsewhere."""

    __slots__ = ()

    def __init__(self, form: Form, whole: Tensor) -> None:
        edge = whole if whole._node is None else (whole._node, whole._index)
        super().__init__("dtensor_to_local", form.joined(), (edge,))

    def gradients(self, cotangents: list[Any], create_graph: bool) -> list[Any]:
        """Kept as the whole is."""
        form, gradient = self.form, state.host(cotangents[0], "dtensor_to_local")
        dims = range(len(form.shape))
        here = [form.local_rows(d, form.coordinates(form.mesh.here)) for d in dims]

        def part_of(pid: int) -> np.ndarray:
            own = [form.local_rows(d, form.coordinates(pid)) for d in dims]
            return gradient if own == here else np.zeros(form.local_shape(pid), gradient.dtype)

        return [in_form(form.from_local(part_of, gradient.dtype), form)]
