"""Tensors moved between placements and meshes; gradients come back in the placement they went from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from polyreme.core import state
from polyreme.core.op import recorded
from polyreme.core.state import Tracer
from polyreme.distributed.auto_parallel.tensors.form import Form, converter
from polyreme.distributed.auto_parallel.tensors.kept import encoded, form_of, in_form, note, stored_of
from polyreme.distributed.auto_parallel.tensors.placements import Placement, check_joins, checked
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh
from polyreme.eager import tape
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ConfigError, PlacementError
from polyreme.ops import OPS
from polyreme.ops.layout import relayout, sharding_constraint


@recorded
def reshard(dist_tensor: Tensor, mesh: ProcessMesh, placements: Sequence[Placement]) -> Tensor:
    """The same value under other placements, on the same mesh, a part of it, or another one.

    Any placement of the mesh can become any other: Replicate to Shard cuts, Shard to Replicate gathers, Partial to
    Replicate adds up over devices, Partial to Shard adds up and scatters, Shard to Shard exchanges, Replicate to
    Partial keeps the value on coordinate 0. Gradients flow through, and come back on the tensor's mesh in its
    placement (Replicate where it is Partial). Raises PlacementError for a dense tensor: shard_tensor takes those.

    >>> from polyreme.distributed import ProcessMesh, Shard, shard_tensor
    >>> mesh = ProcessMesh([0, 1], dim_names=["x"])
    >>> x = shard_tensor([[1.0, 2.0], [3.0, 4.0]], mesh, [Shard(0)])
    >>> reshard(x, mesh, [Shard(1)])._local_value().tolist()
    [[1.0], [3.0]]
    """
    if not isinstance(dist_tensor, Tensor):
        raise TypeError(f"reshard takes a Tensor, got {type(dist_tensor).__name__}")
    source = form_of(dist_tensor)
    target = form_for("reshard", mesh, placements, dist_tensor.shape, dist_tensor.dtype)
    if isinstance(state.read(dist_tensor) if not dist_tensor.own_form else None, Tracer) or state.capturing():
        return _constrain(dist_tensor, source, target)
    if source is None:
        raise PlacementError(
            f"reshard: this Tensor of shape {list(dist_tensor.shape)} lies on no ProcessMesh; shard_tensor puts it on "
            "one"
        )
    return moved(dist_tensor, source, target)


def form_for(what: str, mesh: Any, placements: Any, shape: Sequence[int], dtype: Any = None) -> Form:
    """The Form of these placements of a shape on a mesh; ConfigError or PlacementError for what is none.

    dtype: that of the value to be kept so, if there is one yet.
    """
    if not isinstance(mesh, ProcessMesh):
        raise ConfigError(f"{what}: mesh must be a ProcessMesh, got {type(mesh).__name__}")
    found = Form(mesh, checked(what, placements, mesh, shape), tuple(shape))
    if dtype is not None and found.partial:
        check_joins(what, found.placements, dtype)
    return found


def moved(tensor: Tensor, source: Form, target: Form) -> Tensor:
    """The Tensor in another form, taped."""
    if source == target and source.sharding == target.sharding:
        result = in_form(stored_of(tensor), target)
    else:
        result = in_form(moved_array(stored_of(tensor), source, target), target)
    return linked(tensor, result, Moved(tensor, source.joined(), target))


def moved_array(array: Any, source: Form, target: Form) -> Any:
    """The stored array of target from that of source, moved to another mesh if need be."""
    if source.mesh == target.mesh:
        return converter(source, target)(array)
    if source.plain and target.plain:
        return put(array, target.sharding)
    whole = source.replicated()
    value = array if source == whole else converter(source, whole)(array)
    return encoded(value, target)


def linked(tensor: Tensor, result: Tensor, node: tape.Node) -> Tensor:
    """result, taped as made from tensor by node, if that wants a gradient."""
    result.stop_gradient = tensor.stop_gradient
    if not tensor.stop_gradient and tape.grad_mode.enabled:
        result._node, result._index = node, 0
    elif not tensor.stop_gradient:
        result.stop_gradient = True
    return result


class Moved(tape.UnsavedNode):
    """A Tensor put elsewhere: its gradient goes back to where it came from."""

    back: Form | None
    there: Form | None

    __slots__ = ("back", "there")

    def __init__(self, tensor: Tensor, back: Form | None, there: Form | None) -> None:
        super().__init__("reshard", (leaf_or_edge(tensor),))
        self.back, self.there = back, there

    def gradients(self, cotangents: list[Any], create_graph: bool) -> list[Any]:
        cotangent = cotangents[0]
        if cotangent is None:
            return [None]
        if create_graph:
            return [brought(cotangent, self.back)]
        with tape.GradEnabled(False):
            return [brought(cotangent, self.back)]


def leaf_or_edge(tensor: Any) -> Any:
    """tape.edge_of, without making the value of a Tensor that is kept in another form."""
    if tensor.stop_gradient or tensor._node is not None or not tensor.own_form:
        return tape.edge_of(tensor)
    return tensor


def brought(tensor: Tensor, form: Form | None) -> Tensor:
    """A Tensor, dense or on any mesh, in this form, taped; dense for None."""
    if form is None:
        return dense(tensor)
    have = form_of(tensor)
    if have is not None:
        return tensor if have == form else moved(tensor, have, form)
    result = in_form(encoded(state.read(tensor), form), form)
    return linked(tensor, result, Moved(tensor, None, form))


def dense(tensor: Tensor) -> Tensor:
    """A Tensor's whole value on the default device, on no mesh, taped."""
    form = form_of(tensor)
    if form is None:
        return tensor
    if state.capturing():
        result = OPS["clone"](tensor)
        result.__dict__.pop("_form", None)
        return result
    whole = moved_array(stored_of(tensor), form, form.replicated())
    copy = next(iter(whole.addressable_shards)).data
    result = Tensor(jax.numpy.asarray(jax.device_get(copy)))
    return linked(tensor, result, Moved(tensor, form.joined(), None))


def _constrain(tensor: Tensor, source: Form | None, target: Form) -> Tensor:
    """In a captured function: the value, told where it lies."""
    if source is not None and set(source.mesh.process_ids) != set(target.mesh.process_ids):
        raise CaptureError(
            f"reshard from {source.mesh} to {target.mesh} inside a captured function: one program runs on one set of "
            "devices; call it outside, or cut the function there"
        )
    result = laid_out(tensor, source, target)
    if result is tensor:
        result = OPS["clone"](tensor)  # not the Tensor itself, which lies elsewhere
    note(result, target)
    return result


def laid_out(tensor: Tensor, source: Form | None, target: Form) -> Tensor:
    """In a captured function: the value laid out as target says, its gradient as source does, where jax can say it."""
    if not target.plain:
        return tensor
    if source is not None and source.plain and source.mesh == target.mesh:
        return relayout(tensor, target.sharding, source.sharding)
    return sharding_constraint(tensor, target.sharding)
