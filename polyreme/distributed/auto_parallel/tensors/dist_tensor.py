"""Tensors put on a mesh and taken off it: shard_tensor and its like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.state import TensorState
from polyreme.core.symbol import Symbol
from polyreme.distributed.auto_parallel.tensors.kept import encoded, form_of, in_form, note, started
from polyreme.distributed.auto_parallel.tensors.kept import place as place_kept
from polyreme.distributed.auto_parallel.tensors.mode import install
from polyreme.distributed.auto_parallel.tensors.placements import Placement
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh
from polyreme.distributed.auto_parallel.tensors.reshard import brought, form_for, reshard
from polyreme.eager.host import as_array
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ConfigError
from polyreme.nn.parameter import Parameter

started.call = install


def shard_tensor(
    data: Any,
    mesh: ProcessMesh,
    placements: Sequence[Placement],
    dtype: Any = None,
    place: Any = None,
    stop_gradient: bool | None = None,
) -> Tensor:
    """A Tensor of data's value on a mesh; its shape is the global one.

    data: a Tensor, ndarray, number or nested lists, the whole value. placements: one per mesh dim, Replicate where left
    out. A Parameter becomes a new Parameter of the same name and settings, whose gradient and optimizer state lie as it
    does. A Tensor that a taped op made stays differentiable. stop_gradient: counts unless data is a Tensor and dtype is
    None (then it is as data's). place is there for the signature: the mesh says where the value goes. Raises
    PlacementError for placements that do not fit the shape, ConfigError for what is no mesh.

    >>> from polyreme.distributed import ProcessMesh, Replicate, Shard
    >>> mesh = ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
    >>> x = shard_tensor([[1.0, 2.0], [3.0, 4.0]], mesh, [Shard(0), Replicate()])
    >>> x.placements, x._local_shape
    ([Shard(dim=0), Replicate()], [1, 2])
    """
    if isinstance(data, TensorState) and isinstance(data._array, Symbol) and not data.own_form:
        raise ConfigError("shard_tensor: a Tensor without values (of a static Program or LazyGuard) lies nowhere yet")
    if isinstance(data, Parameter) and (dtype is None or dtypes.as_dtype(dtype) == data.dtype):
        return _parameter(data, mesh, placements)
    if isinstance(data, Tensor):
        cast = data if dtype is None else data.astype(dtype)
        form = form_for("shard_tensor", mesh, placements, cast.shape, cast.dtype)
        result = reshard(cast, mesh, placements) if state.capturing() else _on_mesh(cast, form)
        if dtype is not None and stop_gradient is not None:
            result.stop_gradient = stop_gradient
        return result
    array = as_array(data, dtype, None)
    form = form_for("shard_tensor", mesh, placements, array.shape, array.dtype)
    result = Tensor(array) if state.capturing() else in_form(encoded(array, form), form)
    note(result, form)
    result.stop_gradient = True if stop_gradient is None else stop_gradient
    return result


def _on_mesh(tensor: Tensor, form: Any) -> Tensor:
    """A leaf for a leaf, else taped."""
    if tensor._node is not None:
        return brought(tensor, form)
    have = form_of(tensor)
    if have is not None:
        result = brought(tensor.detach(), form)
    else:
        result = in_form(encoded(state.read(tensor), form), form)
    result.stop_gradient = tensor.stop_gradient
    return result


def _parameter(p: Parameter, mesh: ProcessMesh, placements: Sequence[Placement]) -> Parameter:
    form = form_for("shard_tensor", mesh, placements, p.shape, p.dtype)
    if state.capturing():
        raise CaptureError(f"shard_tensor of parameter {p.name} inside a captured function; place parameters before")
    parameter = Parameter.__new__(Parameter)
    TensorState.__init__(parameter, state.read(p), p.stop_gradient)
    kept = ("_hooks", "_form", "_seen", "_whole")
    parameter.__dict__.update({name: value for name, value in p.__dict__.items() if name not in kept})
    place_kept(parameter, form)
    return parameter


def dtensor_from_fn(
    fn: Callable[..., Any], mesh: ProcessMesh, placements: Sequence[Placement], *args: Any, **kwargs: Any
) -> Tensor:
    """shard_tensor of what fn(*args, **kwargs) gives, such as ones or rand."""
    return shard_tensor(fn(*args, **kwargs), mesh, placements)
