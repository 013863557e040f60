"""The older names of auto_parallel: marks by names of mesh dims, one per dim of the tensor.

Under these names `shard_tensor` is another function than distributed.shard_tensor, which takes placements.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from polyreme.autograd.recompute import run_again
from polyreme.core import rng, state
from polyreme.distributed.auto_parallel.tensors.moves import each_tensor, place_tensor, put_on
from polyreme.distributed.auto_parallel.tensors.placements import Placement, Replicate, Shard
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh, get_mesh
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, PlacementError, ShapeError, did_you_mean
from polyreme.jit import host_calls

_log = logging.getLogger("polyreme.distributed.auto_parallel")
Spec = Sequence[str | None] | None


def shard_tensor(x: Tensor, process_mesh: ProcessMesh | None = None, shard_spec: Spec = None) -> Tensor:
    """x on a mesh, its dim i split along the mesh dim shard_spec[i], or whole for None: x itself if it is a leaf.

    process_mesh: by default that of the `with` block, or of set_mesh. shard_spec: one entry per dim of x; None leaves
    all whole. Raises ShapeError for another number of entries, PlacementError for names that the mesh has not, or that
    come twice, and without a mesh.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"auto_parallel.shard_tensor takes a Tensor, got {type(x).__name__}")
    mesh = _mesh("shard_tensor", process_mesh)
    placements = placements_of("shard_tensor", mesh, shard_spec, x.ndim)
    if x._node is not None or state.capturing():
        return put_on(x, mesh, placements)
    place_tensor(x, mesh, placements)
    return x


def placements_of(what: str, mesh: ProcessMesh, spec: Spec, ndim: int) -> list[Placement]:
    """A placement per mesh dim, of a spec with a name of a mesh dim, or None, per tensor dim.

    >>> mesh = ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
    >>> placements_of("example", mesh, ["y", None], 2)
    [Replicate(), Shard(dim=0)]
    """
    if spec is None:
        return [Replicate()] * mesh.ndim
    if len(spec) != ndim:
        raise ShapeError(
            f"{what}: shard_spec {list(spec)} has {len(spec)} entries, the Tensor {ndim} dims; give one each"
        )
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for dim, name in enumerate(spec):
        if name is None:
            continue
        if name not in mesh.dim_names:
            raise PlacementError(f"{what}: shard_spec {list(spec)} names {name!r}{did_you_mean(name, mesh.dim_names)}")
        if list(spec).count(name) > 1:
            raise PlacementError(f"{what}: shard_spec {list(spec)} names {name!r} twice; a mesh dim splits one dim")
        placements[mesh.dim_names.index(name)] = Shard(dim)
    return placements


class DistAttr:
    """A mesh and the name of the mesh dim, or None, that splits each dim of a tensor; see placements_of for errors.

    >>> mesh = ProcessMesh([[2, 4, 5], [0, 1, 3]], dim_names=["x", "y"])
    >>> DistAttr(mesh, ["x", None]).dims_mapping, DistAttr(mesh, ["x", None]).placements
    ([0, -1], [Shard(dim=0), Replicate()])
    """

    process_mesh: ProcessMesh
    sharding_specs: list[str | None]
    placements: list[Placement]

    def __init__(self, mesh: ProcessMesh, sharding_specs: Sequence[str | None]) -> None:
        if not isinstance(mesh, ProcessMesh):
            raise ConfigError(f"DistAttr: mesh is a {type(mesh).__name__}; give a ProcessMesh")
        self.process_mesh, self.sharding_specs = mesh, list(sharding_specs)
        self.placements = placements_of("DistAttr", mesh, self.sharding_specs, len(self.sharding_specs))

    @property
    def dims_mapping(self) -> list[int]:
        """Index of the mesh dim that splits each tensor dim; -1 for none."""
        names = self.process_mesh.dim_names
        return [-1 if name is None else names.index(name) for name in self.sharding_specs]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DistAttr):
            return False
        return (other.process_mesh, other.dims_mapping) == (self.process_mesh, self.dims_mapping)

    def __hash__(self) -> int:
        return hash((self.process_mesh, tuple(self.dims_mapping)))

    def __repr__(self) -> str:
        return f"DistAttr({self.process_mesh!r}, {self.sharding_specs})"


def shard_op(
    op: Callable[..., Any],
    process_mesh: ProcessMesh | None = None,
    in_shard_specs: Sequence[Spec] | None = None,
    out_shard_specs: Sequence[Spec] | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """op, on Tensors that are first put on a mesh by in_shard_specs, one spec per Tensor argument, and whose results
    are put there by out_shard_specs.

    A spec is as in auto_parallel.shard_tensor; None in place of one, or of all, leaves that Tensor, or all, whole.
    Raises ConfigError for other settings, and in the call for another number of specs than Tensors.
    """
    if not callable(op):
        raise ConfigError(f"shard_op: op is a {type(op).__name__}; give a function or Layer")
    if kwargs:
        raise ConfigError(f"shard_op: unknown settings {sorted(kwargs)}; give in_shard_specs and out_shard_specs")
    mesh = _mesh("shard_op", process_mesh)

    @functools.wraps(op, updated=())
    def sharded(*args: Any, **named: Any) -> Any:
        given, inner = _spread("in_shard_specs", (args, named), mesh, in_shard_specs)
        return _spread("out_shard_specs", op(*given, **inner), mesh, out_shard_specs)

    return sharded


def _spread(what: str, values: Any, mesh: ProcessMesh, specs: Sequence[Spec] | None) -> Any:
    found: list[Tensor] = []
    each_tensor(values, lambda x: found.append(x) or x)
    if specs is not None and len(specs) != len(found):
        raise ConfigError(f"shard_op: {len(specs)} {what} for {len(found)} Tensors; give a spec, or None, for each")
    rest = iter([None] * len(found) if specs is None else specs)
    return each_tensor(values, lambda x: put_on(x, mesh, placements_of("shard_op", mesh, next(rest), x.ndim)))


def _mesh(what: str, given: ProcessMesh | None) -> ProcessMesh:
    mesh = given if given is not None else get_mesh()
    if mesh is None:
        raise PlacementError(f"{what}: no process_mesh was given, and none is set; give one, or call set_mesh")
    if not isinstance(mesh, ProcessMesh):
        raise ConfigError(f"{what}: process_mesh is a {type(mesh).__name__}; give a ProcessMesh")
    return mesh


def recompute(op: Callable[..., Any]) -> Callable[..., Any]:
    """op, whose calls are computed again in backward instead of keeping what they computed.

    Raises ConfigError for what cannot be called.

    >>> x = Tensor(3.0, stop_gradient=False)
    >>> recompute(lambda v: v * v)(x).backward()
    >>> x.grad.item()
    6.0
    """
    if not callable(op):
        raise ConfigError(f"auto_parallel.recompute takes a function or Layer, got {type(op).__name__}")

    @functools.wraps(op, updated=())
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return run_again(op, args, kwargs)

    return recomputed


class Fetched:
    """The values last passed to fetch, by name, as ndarrays."""

    def __init__(self) -> None:
        self.values: dict[str, np.ndarray] = {}

    def put(self, name: str, value: Any, logging: bool) -> None:
        """Note a value, and log it if asked to."""
        self.values[name] = np.array(value)
        if logging:
            _log.info("%s = %s", name, self.values[name])

    def take(self) -> Mapping[str, np.ndarray]:
        """The values since the last take."""
        found, self.values = self.values, {}
        return found


fetched: Fetched = Fetched()


def fetch(tensor: Tensor, name: str | None = None, logging: bool = False) -> None:
    """Note a Tensor's value under a name (its own by default) each time this runs, in captured code too:
    `fetched.take()` gives the last ones. logging: write it to the log, too.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"fetch takes a Tensor, got {type(tensor).__name__}")
    label = name if name is not None else tensor.name
    if state.capturing():
        host_calls.at_run_time(lambda value: fetched.put(label, value, logging), state.read(tensor), ordered=False)
    else:
        fetched.put(label, tensor.numpy(), logging)


def parallel_manual_seed(seed: int, name: str = "") -> None:
    """Start the random numbers of ops from a seed. They belong to elements of global Tensors, so they are the same on
    every mesh: independent between pieces, equal between copies. Raises ConfigError for a name: there is one stream
    here, and named ones are fleet's get_rng_state_tracker.
    """
    if name:
        raise ConfigError(f"parallel_manual_seed: name={name!r}; use get_rng_state_tracker().add(name, seed) of fleet")
    rng.default_generator.manual_seed(seed)
