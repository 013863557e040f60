"""A Tensor in pieces made whole."""

from __future__ import annotations

from jax.sharding import NamedSharding, PartitionSpec

from polyreme.core import state
from polyreme.core.state import Tracer
from polyreme.distributed.auto_parallel.tensors.kept import form_of
from polyreme.distributed.auto_parallel.tensors.reshard import dense
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError
from polyreme.ops.layout import sharding_constraint


def unshard_dtensor(dist_tensor: Tensor) -> Tensor:
    """The whole value as a dense Tensor; gradients flow through. Itself if it is on no mesh.

    One that a plan placed has a whole copy on every device of the plan's mesh. Over a mesh that spans processes each of
    them must call it; the result's value can then be read in each. Raises CaptureError inside a captured function for
    what a plan placed, as the compiler chooses its layout there.
    """
    if not isinstance(dist_tensor, Tensor):
        raise TypeError(f"unshard_dtensor takes a Tensor, got {type(dist_tensor).__name__}")
    if form_of(dist_tensor) is not None:
        return dense(dist_tensor)
    array = state.read(dist_tensor)
    if isinstance(array, Tracer):
        raise CaptureError("unshard_dtensor inside a captured function: layouts are chosen later; call it outside")
    if not isinstance(array.sharding, NamedSharding):
        return dist_tensor
    return sharding_constraint(dist_tensor, NamedSharding(array.sharding.mesh, PartitionSpec()))
