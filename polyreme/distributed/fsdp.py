"""fully_shard: a layer whose parameters, gradients and optimizer state lie in parts over a mesh.

Source: arXiv:1910.02054, stage 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from polyreme.distributed.auto_parallel.layers.shard_optimizer import ShardingStage3
from polyreme.distributed.auto_parallel.tensors.form import Form
from polyreme.distributed.auto_parallel.tensors.kept import form_of, place
from polyreme.distributed.auto_parallel.tensors.placements import Replicate, Shard
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh, get_mesh
from polyreme.errors import ConfigError, PlacementError
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import Parameter

_DIMS = ("sharding", "fsdp", "dp")


def fully_shard(
    module: Layer,
    mesh: ProcessMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[Parameter], Shard | None] | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: Iterable[Parameter] | None = None,
    enable_tensor_fusion_and_overlap: bool = True,
) -> Layer:
    """The layer itself, each of whose parameters lies in parts over a mesh, as its gradient and optimizer state will.

    Make its optimizer afterwards. mesh: by default the global one; of several dims, the one called "sharding", "fsdp"
    or "dp" splits. shard_placement_fn: which dim of a parameter is split (an even split), None for the one chosen here:
    the first that divides. ignored_params stay whole. An op that reads a parameter gathers it, and nothing keeps it
    gathered; XLA joins and overlaps transfers, so reshard_after_forward=True and enable_tensor_fusion_and_overlap
    change nothing.

    Raises ConfigError for reshard_after_forward=False, a policy (use amp.decorate, or a Plan's offload), a mesh without
    a dim to split over, and a dim that does not divide.
    """
    if not isinstance(module, Layer):
        raise ConfigError(f"fully_shard takes a Layer, got {type(module).__name__}")
    if reshard_after_forward not in (None, True):
        raise ConfigError(
            f"fully_shard: reshard_after_forward={reshard_after_forward!r}; parameters are gathered for each op that "
            "reads them, leave it out"
        )
    for name, given in (("mp_policy", mp_policy), ("offload_policy", offload_policy)):
        if given is not None:
            raise ConfigError(f"fully_shard: {name} is not available; use amp.decorate, or offload in a Plan")
    where = mesh if mesh is not None else get_mesh()
    if where is None:
        raise PlacementError("fully_shard: no mesh was given, and none is set; give one, or call set_mesh")
    stage = ShardingStage3(_dim(where), where)
    ignored = {id(p) for p in ignored_params or ()}
    for p in module.parameters():
        chosen = None if shard_placement_fn is None else shard_placement_fn(p)
        if id(p) in ignored:
            if form_of(p) is None:
                place(p, Form(where, (Replicate(),) * where.ndim, tuple(p.shape)))
        elif chosen is None:
            stage.place([p])
        else:
            _shard_parameter(p, where, stage, chosen)
    for buffer in module.buffers():
        if form_of(buffer) is None:
            place(buffer, Form(where, (Replicate(),) * where.ndim, tuple(buffer.shape)))
    return module


def _dim(mesh: ProcessMesh) -> str:
    if mesh.ndim == 1:
        return mesh.dim_names[0]
    dim_name = next((name for name in _DIMS if name in mesh.dim_names), None)
    if dim_name is None:
        raise ConfigError(
            f"fully_shard: which dim of {mesh} splits? call it one of {', '.join(_DIMS)}, or give it alone"
        )
    return dim_name


def _shard_parameter(p: Parameter, mesh: ProcessMesh, stage: ShardingStage3, chosen: Any) -> None:
    """Place a parameter by stage 3, split along the dim that was chosen."""
    if not isinstance(chosen, Shard):
        raise ConfigError(f"fully_shard: shard_placement_fn gave {chosen!r} for {p.name}; give a Shard or None")
    ways = mesh.get_dim_size(stage.sharding_mesh_dim)
    dim = chosen.get_dim()
    if not -p.ndim <= dim < p.ndim or p.shape[dim] % ways:
        raise ConfigError(
            f"fully_shard: {chosen} of {p.name}, of shape {list(p.shape)}, does not split evenly over {ways} devices"
        )
    stage.place([p], dim % p.ndim)
