"""Topology of a hybrid-parallel job: which rank sits where on which axis, and the groups that talk along an axis.

A rank is the index of a device in the mesh. "This rank" is the first device that this process drives: with
one process, rank 0.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from polyreme.distributed.communication.group import Group, axis_group
from polyreme.errors import ConfigError, PlacementError, did_you_mean
from polyreme.mesh import AXES, MeshShape

AXIS_OF = {
    "data": "dp",
    "pipe": "pp",
    "sharding": "sharding",
    "sep": "sep",
    "context": "cp",
    "model": "mp",
    "expert": "ep",
}
"""The name of an axis in a topology -> in a strategy and a mesh; there is no context axis in a mesh."""
NAME_OF = {axis: name for name, axis in AXIS_OF.items()}
_NAMES = ("data", "pipe", "sharding", "sep", "context", "model")


class ParallelMode:
    """The main kind of parallelism of a job."""

    DATA_PARALLEL = 0
    TENSOR_PARALLEL = 1
    PIPELINE_PARALLEL = 2
    SHARDING_PARALLEL = 3
    SEGMENT_PARALLEL = 4


class CommunicateTopology:
    """Ranks on a grid of named axes, the last axis varying fastest.

    Raises PlacementError for an axis it does not have, with the closest that it has, and for coordinates off the grid.

    >>> grid = CommunicateTopology(["data", "model"], [2, 2])
    >>> grid.get_rank(data=1, model=0), grid.get_coord(3), grid.get_comm_list("data")
    (2, Coordinate(data=1, model=1), [[0, 2], [1, 3]])
    """

    def __init__(
        self,
        hybrid_group_names: Sequence[str] = _NAMES,
        dims: Sequence[int] = (1,) * len(_NAMES),
    ) -> None:
        if len(hybrid_group_names) != len(dims) or len(set(hybrid_group_names)) != len(dims):
            raise PlacementError(
                f"a topology has one degree for each of its different axes, got axes {list(hybrid_group_names)} and "
                f"degrees {list(dims)}"
            )
        if any(isinstance(d, bool) or not isinstance(d, (int, np.integer)) or d < 1 for d in dims):
            raise PlacementError(f"degrees {list(dims)} of a topology; give whole numbers of at least 1")
        self._names = tuple(hybrid_group_names)
        self._grid = np.arange(int(np.prod(dims))).reshape([int(d) for d in dims])
        self.coordinate: type[Any] = collections.namedtuple("Coordinate", self._names)  # its fields are the axes

    def __deepcopy__(self, memo: dict[Any, Any]) -> CommunicateTopology:
        return self  # it never changes

    def get_hybrid_group_names(self) -> list[str]:
        """The axes, outermost first."""
        return list(self._names)

    def get_dim(self, axis_name: str) -> int:
        """Number of ranks along an axis."""
        return self._grid.shape[self._axis_index(axis_name)]

    get_dim_size = get_dim

    def world_size(self) -> int:
        """Number of ranks."""
        return self._grid.size

    def get_rank(self, **args: int) -> int:
        """The rank at these coordinates, one for each axis."""
        if set(args) != set(self._names):
            raise PlacementError(f"get_rank takes one coordinate for each of {list(self._names)}, got {args}")
        at = tuple(args[name] for name in self._names)
        if any(not 0 <= i < size for i, size in zip(at, self._grid.shape, strict=True)):
            raise PlacementError(f"get_rank: {args} is off the grid of {self._sizes()}")
        return int(self._grid[at])

    def get_coord(self, rank: int) -> Any:
        """The coordinates of a rank, a named tuple."""
        if not 0 <= rank < self._grid.size:
            raise PlacementError(f"get_coord: rank {rank} is not in 0..{self._grid.size - 1}")
        return self.coordinate(*(int(i) for i in np.unravel_index(rank, self._grid.shape)))

    def get_axis_list(self, axis_name: str, index: int) -> list[int]:
        """All ranks with this coordinate on an axis, ascending; [] for a coordinate that no rank has."""
        at = self._axis_index(axis_name)
        if not 0 <= index < self._grid.shape[at]:
            return []
        return sorted(np.take(self._grid, index, at).reshape(-1).tolist())

    def get_comm_list(self, axis_name: str) -> list[list[int]]:
        """The groups of ranks that differ on one axis only."""
        return self._groups([axis_name])

    def get_fused_ranks(self, fused_axis: Sequence[str]) -> list[list[int]]:
        """The groups of ranks that differ on these axes only."""
        return self._groups(fused_axis)

    def get_rank_from_stage(self, global_rank: int, **kwargs: int) -> int:
        """The rank with the coordinates of global_rank, but for those given: get_rank_from_stage(0, pipe=1)."""
        for name in kwargs:
            self._axis_index(name)
        return self.get_rank(**{**self.get_coord(global_rank)._asdict(), **kwargs})

    def _groups(self, names: Sequence[str]) -> list[list[int]]:
        inside = sorted({self._axis_index(name) for name in names})
        outside = [i for i in range(self._grid.ndim) if i not in inside]
        width = int(np.prod([self._grid.shape[i] for i in inside]))
        return self._grid.transpose([*outside, *inside]).reshape(-1, width).tolist()

    def _axis_index(self, name: str) -> int:
        if name not in self._names:
            raise PlacementError(f"the topology has no axis {name!r}{did_you_mean(name, self._names)}")
        return self._names.index(name)

    def _sizes(self) -> str:
        return ", ".join(f"{name} {size}" for name, size in zip(self._names, self._grid.shape, strict=True))


def topology_of(mesh: MeshShape, order: Sequence[str] = AXES) -> CommunicateTopology:
    """The topology of a mesh: its axes in their order, with a context axis of one rank where `order` has "cp", and an
    expert axis only where experts are split.
    """
    names = [axis for axis in dict.fromkeys([*order, *mesh.order]) if axis != "ep" or mesh.ep > 1]
    degrees = {**mesh.degrees, "cp": 1}
    return CommunicateTopology([NAME_OF[axis] for axis in names], [degrees[axis] for axis in names])


class HybridCommunicateGroup:
    """The coordinates and groups of this rank on each axis of a topology over all devices.

    A group is a Group of mesh axes: a collective on it works on the pieces that its devices hold of a global Tensor. An
    axis that the topology has not counts as one of degree 1. hybrid_configs tunes NCCL in other programs; XLA needs
    no tuning. Raises PlacementError for a topology of another number of ranks than there are devices, or with axes that
    a mesh has not.
    """

    def __init__(self, topology: CommunicateTopology, hybrid_configs: Any = None) -> None:
        self._topology = topology
        devices = jax.devices()
        shape = _mesh_shape(topology, len(devices))
        self._rank = devices.index(jax.local_devices()[0])
        # the same mesh as a Layout of such a plan has, so that groups fit the Tensors that it places
        self.mesh = Mesh(np.asarray(devices).reshape(list(shape.degrees.values())), tuple(shape.degrees))
        self._axis_groups: dict[tuple[str, ...], Group] = {}

    def topology(self) -> CommunicateTopology:
        """The topology."""
        return self._topology

    def get_global_rank(self) -> int:
        """This rank."""
        return self._rank

    def get_parallel_mode(self) -> int:
        """One of ParallelMode: pipeline before tensor, segment, sharding and data parallelism."""
        order = (
            ("pipe", ParallelMode.PIPELINE_PARALLEL),
            ("model", ParallelMode.TENSOR_PARALLEL),
            ("sep", ParallelMode.SEGMENT_PARALLEL),
            ("sharding", ParallelMode.SHARDING_PARALLEL),
        )
        return next((mode for name, mode in order if self._size(name) > 1), ParallelMode.DATA_PARALLEL)

    # data

    def get_data_parallel_rank(self) -> int:
        """This rank's place on the data axis."""
        return self._place("data")

    def get_data_parallel_world_size(self) -> int:
        """Degree of data parallelism."""
        return self._size("data")

    def get_data_parallel_group(self) -> Group:
        """The group along the data axis."""
        return self._group("data")

    def get_data_parallel_group_src_rank(self) -> int:
        """First rank of the data group."""
        return self._first("data")

    # tensor

    def get_model_parallel_rank(self) -> int:
        """This rank's place on the model axis."""
        return self._place("model")

    def get_model_parallel_world_size(self) -> int:
        """Degree of tensor parallelism."""
        return self._size("model")

    def get_model_parallel_group(self) -> Group:
        """The group along the model axis."""
        return self._group("model")

    def get_model_parallel_group_src_rank(self) -> int:
        """First rank of the model group."""
        return self._first("model")

    # sharding

    def get_sharding_parallel_rank(self) -> int:
        """This rank's place on the sharding axis."""
        return self._place("sharding")

    def get_sharding_parallel_world_size(self) -> int:
        """Degree of parameter sharding."""
        return self._size("sharding")

    def get_sharding_parallel_group(self) -> Group:
        """The group along the sharding axis."""
        return self._group("sharding")

    def get_sharding_parallel_group_src_rank(self) -> int:
        """First rank of the sharding group."""
        return self._first("sharding")

    # segments of the sequence

    def get_sep_parallel_rank(self) -> int:
        """This rank's place on the sep axis."""
        return self._place("sep")

    def get_sep_parallel_world_size(self) -> int:
        """Degree of segment parallelism."""
        return self._size("sep")

    def get_sep_parallel_group(self) -> Group:
        """The group along the sep axis."""
        return self._group("sep")

    def get_sep_parallel_group_src_rank(self) -> int:
        """First rank of the sep group."""
        return self._first("sep")

    # experts

    def get_expert_parallel_rank(self) -> int:
        """This rank's place on the expert axis."""
        return self._place("expert")

    def get_expert_parallel_world_size(self) -> int:
        """Degree of expert parallelism."""
        return self._size("expert")

    def get_expert_parallel_group(self) -> Group:
        """The group along the expert axis."""
        return self._group("expert")

    def get_expert_parallel_group_src_rank(self) -> int:
        """First rank of the expert group."""
        return self._first("expert")

    # state of experts, which lies over the sharding axis like that of other parameters

    def get_moe_sharding_parallel_rank(self) -> int:
        """This rank's place on the axis that experts' state is split over."""
        return self._place("sharding")

    def get_moe_sharding_parallel_world_size(self) -> int:
        """Number of parts of an expert's state."""
        return self._size("sharding")

    def get_moe_sharding_parallel_group(self) -> Group:
        """The group along the axis that experts' state is split over."""
        return self._group("sharding")

    def get_moe_sharding_parallel_group_src_rank(self) -> int:
        """First rank of that group."""
        return self._first("sharding")

    # pipeline

    def get_stage_id(self) -> int:
        """This rank's pipeline stage."""
        return self._place("pipe")

    def get_pipe_parallel_rank(self) -> int:
        """This rank's pipeline stage."""
        return self._place("pipe")

    def get_pipe_parallel_world_size(self) -> int:
        """Number of pipeline stages."""
        return self._size("pipe")

    def get_pipe_parallel_group(self) -> Group:
        """The group along the pipe axis."""
        return self._group("pipe")

    def get_rank_from_stage(self, stage_id: int, **kwargs: int) -> int:
        """The rank of a stage that stands where this rank does on the other axes."""
        return self._topology.get_rank_from_stage(self._rank, pipe=stage_id, **kwargs)

    def get_p2p_groups(self) -> Any:
        """There are none: raises ConfigError."""
        raise ConfigError(
            "get_p2p_groups: activations go from stage to stage through jax.device_put, without groups of their own; "
            "use get_pipe_parallel_group for a collective over the stages"
        )

    @property
    def is_first_stage(self) -> bool:
        """True if this rank's stage is the first."""
        return self.get_stage_id() == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this rank's stage is the last."""
        return self.get_stage_id() == self.get_pipe_parallel_world_size() - 1

    # several axes at once

    def get_dp_sep_parallel_group(self) -> Group:
        """The group along data and sep: all that read other parts of one batch with the same weights."""
        return self._group("data", "sep")

    def get_pp_mp_parallel_group(self) -> Group:
        """The group along pipe and model: all that hold parts of one copy of the model."""
        return self._group("pipe", "model")

    def get_check_parallel_group(self, sharding: bool = False) -> Group:
        """The group of all that have this rank's place on the data axis (on the sharding axis if `sharding`)."""
        kept = "sharding" if sharding else "data"
        return self._group(*[n for n in self._topology.get_hybrid_group_names() if n != kept])

    def create_fuse_group(self, fused_strategy_list: Sequence[str]) -> tuple[list[int], Group]:
        """(ranks, group) along several axes, by their names in the topology."""
        group = self._group(*fused_strategy_list)
        return group.ranks, group

    # how

    def _size(self, name: str) -> int:
        return self._topology.get_dim(name) if self._has(name) else 1

    def _place(self, name: str) -> int:
        return getattr(self._topology.get_coord(self._rank), name) if self._has(name) else 0

    def _first(self, name: str) -> int:
        return self._group(name).ranks[0]

    def _has(self, name: str) -> bool:
        return name in self._topology.get_hybrid_group_names()

    def _group(self, *names: str) -> Group:
        for name in names:
            if name not in AXIS_OF:
                raise PlacementError(f"no group along axis {name!r}{did_you_mean(name, AXIS_OF)}")
        # a context axis has one rank, and no place in the mesh
        axes = tuple(AXIS_OF[name] for name in names if name != "context")
        if axes not in self._axis_groups:
            self._axis_groups[axes] = axis_group(self.mesh, axes)
        return self._axis_groups[axes]


def _mesh_shape(topology: CommunicateTopology, num_devices: int) -> MeshShape:
    degrees = {name: topology.get_dim(name) for name in topology.get_hybrid_group_names()}
    for name in degrees:
        if name not in AXIS_OF:
            raise PlacementError(f"the topology's axis {name!r} is none of a mesh{did_you_mean(name, AXIS_OF)}")
    if degrees.pop("context", 1) > 1:
        raise PlacementError("the topology splits 'context'; split the sequence along 'sep' instead")
    by_axis = {AXIS_OF[name]: size for name, size in degrees.items()}
    shape = MeshShape(**by_axis, order=tuple(by_axis))  # type: ignore[arg-type]
    shape.check_devices(num_devices)
    return shape
