"""Members of a Tensor about its place on a mesh of processes: is_dist(), process_mesh, placements and its local part.

What they answer is found in distributed.auto_parallel, which stands above and sets `lookup` when loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyreme.core import state
from polyreme.core.symbol import Symbol
from polyreme.errors import PlacementError


class _Lookup:
    """form: Tensor -> how it lies on a mesh, None for a dense one. local: (Tensor, process id or None) -> its part.
    used: whether any Tensor was put on a mesh yet."""

    __slots__ = ("form", "local", "used")

    def __init__(self) -> None:
        self.used = False
        self.form: Callable[[Any], Any] = _nowhere
        self.local: Callable[[Any, int | None], Any] | None = None


def _nowhere(tensor: Any) -> None:
    return None


lookup: _Lookup = _Lookup()


def forms_of(tensors: Sequence[Any]) -> list[Any]:
    """The forms of these Tensors on their meshes; [] while no Tensor was ever on one."""
    return [lookup.form(t) for t in tensors] if lookup.used else []


def say_form(tensor: Any, form: Any) -> None:
    """Note how a Tensor made in a captured function lies, if it is on a mesh."""
    if form is not None:
        tensor.__dict__["_form"] = form


class DistMembers:
    """Members of Tensor about meshes. A dense Tensor has None for each; what a plan placed has no ProcessMesh."""

    __slots__ = ()
    _array: Any

    def is_dist(self) -> bool:
        """True if it lies on a ProcessMesh, or on several devices in another way."""
        return self.num_shard is not None

    @property
    def process_mesh(self) -> Any:
        """The ProcessMesh it lies on."""
        form = lookup.form(self)
        return None if form is None else form.mesh

    @property
    def placements(self) -> list[Any] | None:
        """Shard, Replicate or Partial for each dim of the mesh."""
        form = lookup.form(self)
        return None if form is None else list(form.placements)

    @property
    def num_shard(self) -> int | None:
        """Number of different pieces that the value is split in; of a Tensor on no ProcessMesh, of its devices."""
        form = lookup.form(self)
        if form is not None:
            return form.pieces
        unknown = isinstance(self._array, (state.Tracer, Symbol))
        sharding = None if unknown else getattr(self._array, "sharding", None)
        return None if sharding is None or len(sharding.device_set) == 1 else len(sharding.device_set)

    @property
    def _local_shape(self) -> list[int] | None:
        """Shape of the part on this process's first device of the mesh."""
        form = lookup.form(self)
        return None if form is None else list(form.local_shape(form.mesh.here))

    def _local_value(self, process_id: int | None = None) -> Any:
        """The part on one device, as a dense Tensor: addends are not joined.

        process_id: whose; this process's first device on the mesh by default. PlacementError for a dense Tensor.
        """
        if lookup.form(self) is None or lookup.local is None:
            raise PlacementError("_local_value: this Tensor lies on no ProcessMesh; shard_tensor puts it on one")
        return lookup.local(self, process_id)

    def _dist_facts(self) -> str:
        form = lookup.form(self)
        if form is None:
            return ""
        mesh = form.mesh
        grid = f"{{shape: {mesh.shape}, process_ids: {mesh.process_ids}, dim_names: [{', '.join(mesh.dim_names)}]}}"
        return f", process_mesh={grid}, placements={list(form.placements)}, GlobalDenseTensor="
