"""Collectives of the devices along mesh axes: on the pieces of one global Tensor that the members hold.

What every member gets alike keeps the Tensor's layout (or loses the group's axes, where members' values are
listed); what differs from member to member lies along dim 0, split over the group's axes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polyreme.core import layout as layouts
from polyreme.core.state import Tracer
from polyreme.distributed.communication import bodies
from polyreme.distributed.communication.group import Group
from polyreme.distributed.communication.local_body import running
from polyreme.distributed.job import watchdog
from polyreme.eager.host import put
from polyreme.errors import ShapeError

_KEEPS = ("all_reduce", "reduce", "broadcast")
_DIFFERS = ("reduce_scatter", "alltoall", "scatter")


def run(
    kind: str, arrays: Sequence[Any], group: Group, split: bool = False, join: bool = False, **static: int
) -> list[Any]:
    """The collective of this kind on the local values of global arrays, all of one shape and dtype.

    An array that is not on a mesh with the group's axes is put whole on every device of the group's mesh first; so is a
    value inside a captured function, whose layout the compiler has yet to choose. In a function that local_map runs,
    arrays are the device's own.
    """
    if running.body is not None and set(group.axes) <= set(running.body.axes):
        return bodies.run(kind, list(arrays), group.axes, group.nranks, split, join, static)
    mesh = _mesh_of(arrays[0], group)
    spec = _spec(arrays[0], mesh)
    placed = [_place(a, mesh, spec) for a in arrays]
    out_spec = _out_spec(kind, spec, group.axes, placed[0].ndim or int(join))
    _check_split(kind, placed[0], mesh, spec, group, split)
    program = _program(mesh, kind, group.axes, spec, out_spec, split, join, tuple(sorted(static.items())))
    with watchdog.phase(kind, detail=f"along {', '.join(group.axes)}"):
        return program(*placed)


def _mesh_of(array: Any, group: Group) -> Mesh:
    """The mesh the array lies on, if the group's axes are there: of a pipeline, that is its stage's."""
    assert group.mesh is not None
    layout = layouts.active.layout
    mesh = layout.mesh if isinstance(array, Tracer) and layout is not None else _own_mesh(array)
    if mesh is None or any(mesh.shape.get(a) != group.mesh.shape[a] for a in group.axes):
        return group.mesh
    return mesh


def _own_mesh(array: Any) -> Any:
    if isinstance(array, Tracer) or not isinstance(array.sharding, NamedSharding):
        return None
    return array.sharding.mesh


def _spec(array: Any, mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    """Per dim, the mesh axes that split it."""
    if _own_mesh(array) != mesh:
        return ((),) * array.ndim
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in array.sharding.spec]
    return tuple(entries) + ((),) * (array.ndim - len(entries))


def _place(array: Any, mesh: Mesh, spec: tuple) -> Any:
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    if isinstance(array, Tracer):
        return jax.lax.with_sharding_constraint(array, sharding)
    return array if array.sharding == sharding else put(array, sharding)


def _out_spec(kind: str, spec: tuple, axes: tuple[str, ...], ndim: int) -> tuple:
    if kind in _KEEPS:
        return spec
    full = spec or ((),) * ndim
    stripped = tuple(tuple(a for a in entry if a not in axes) for entry in full)
    if kind not in _DIFFERS:
        return stripped
    if not stripped:
        raise ShapeError(f"{kind} on mesh axes {axes}: a 0-D Tensor has no dim along which members' results can lie")
    return ((*axes, *stripped[0]), *stripped[1:])


def _check_split(kind: str, array: Any, mesh: Mesh, spec: tuple, group: Group, split: bool) -> None:
    if not split:
        return
    rows = array.shape[0] // math.prod(mesh.shape[a] for a in spec[0])
    if rows % group.nranks:
        raise ShapeError(
            f"{kind}: dim 0 of shape {list(array.shape)} is {rows} rows on each device, which {group.nranks} members "
            f"of group {group.name} cannot share equally; give a multiple of {group.nranks}"
        )


@functools.lru_cache(maxsize=4096)
def _program(
    mesh: Mesh, kind: str, axes: tuple, spec: tuple, out_spec: tuple, split: bool, join: bool, static: tuple
) -> Any:
    n = math.prod(mesh.shape[a] for a in axes)

    def body(*xs: Any) -> list[Any]:
        return bodies.run(kind, list(xs), axes, n, split, join, dict(static))

    body.__name__ = kind
    given, made = PartitionSpec(*spec), PartitionSpec(*out_spec)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=given, out_specs=made, check_vma=False))
