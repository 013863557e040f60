"""Members of a collective: every notation of replica_groups, and the mesh axes that a grouping runs along."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np

from polyreme.errors import ConfigError
from polyreme.mesh import MeshShape

Groups = tuple[tuple[int, ...], ...]
_LISTS = re.compile(r"replica_groups=\{((?:\{[\d,\s]*\},?\s*)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:,\s*device_ids=\((.*?)\)\s*)?\s*\{([^}]*)\}")
_MESH_IDS = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\)?)?")
_SUB_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?\s*)*)\}")


def parse_groups(attributes: str, num_devices: int) -> Groups:
    """The groups of device indexes in an HLO instruction's attributes; all devices together if it names none.

    Raises ConfigError for a notation that is not known, showing it.

    >>> parse_groups("channel_id=1, replica_groups=[2,2]<=[2,2]T(1,0), use_global_device_ids=true", 4)
    ((0, 2), (1, 3))
    >>> parse_groups("replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_1'}", 4)
    ((0, 1), (2, 3))
    """
    if "replica_groups=" not in attributes:
        return (tuple(range(num_devices)),)
    if match := _LISTS.search(attributes):
        listed = [_numbers(text) for text in re.findall(r"\{([\d,\s]*)\}", match[1])]
        return tuple(group for group in listed if group) or (tuple(range(num_devices)),)
    if match := _IOTA.search(attributes):
        ids = _iota(match[2], match[3]).reshape(_numbers(match[1]))
        return _rows(ids.reshape(ids.shape[0], -1))
    if match := _MESH.search(attributes):
        return _mesh_groups(match[1], match[2], match[3])
    shown = attributes[attributes.find("replica_groups=") :][:80]
    raise ConfigError(f"this notation of replica groups is not known: {shown!r}; please report it with the XLA version")


def parse_pairs(attributes: str) -> tuple[tuple[int, int], ...]:
    """The (source, target) device indexes of a collective-permute.

    >>> parse_pairs("channel_id=1, source_target_pairs={{0,1},{1,0}}")
    ((0, 1), (1, 0))
    """
    found = _PAIRS.search(attributes)
    pairs = re.findall(r"\{(\d+),(\d+)\}", found[1]) if found else []
    return tuple((int(a), int(b)) for a, b in pairs)


def axes_of(groups: Groups, mesh: MeshShape) -> tuple[str, ...] | None:
    """The mesh axes along which these groups' members differ, outermost first; () for groups of one, None if no set
    of axes has these groups, nor one axis that is cut in equal parts, of neighbours or of every n-th device.

    >>> axes_of(((0, 1), (2, 3)), MeshShape(dp=2, mp=2)), axes_of(((0, 2), (1, 3)), MeshShape(sep=4))
    (('mp',), ('sep',))
    """
    wanted = {frozenset(group) for group in groups}
    if all(len(group) == 1 for group in wanted):
        return ()
    for axes in _axis_sets(mesh):
        if {frozenset(group) for group in mesh.groups(*axes)} == wanted:
            return axes
    size = len(next(iter(wanted)))
    for axis in (axis for axis in mesh.order if size < mesh.degree(axis) and mesh.degree(axis) % size == 0):
        lines, count = mesh.groups(axis), mesh.degree(axis) // size
        runs = {frozenset(line[at * size : (at + 1) * size]) for line in lines for at in range(count)}
        if wanted in (runs, {frozenset(line[at::count]) for line in lines for at in range(count)}):
            return (axis,)
    return None


def axes_of_pairs(pairs: tuple[tuple[int, int], ...], mesh: MeshShape) -> tuple[str, ...] | None:
    """The fewest mesh axes along which every pair's source and target differ; () if nothing leaves its device."""
    moved = [pair for pair in pairs if pair[0] != pair[1]]
    if any(device >= mesh.size for pair in moved for device in pair):
        return None
    places = [(mesh.coordinates(a), mesh.coordinates(b)) for a, b in moved]
    return tuple(axis for axis in mesh.order if any(a[axis] != b[axis] for a, b in places))


def _axis_sets(mesh: MeshShape) -> list[tuple[str, ...]]:
    live = [axis for axis in mesh.order if mesh.degree(axis) > 1]
    return [axes for count in range(1, len(live) + 1) for axes in itertools.combinations(live, count)]


def _mesh_groups(sizes: str, ids: str | None, along: str) -> Groups:
    """Groups over named axes of a mesh that may permute the devices; 'x':(before)size is a part of an axis."""
    names = re.findall(r"'([^']+)'=(\d+)", sizes)
    shape = [int(size) for _, size in names]
    devices = _mesh_devices(ids, math.prod(shape)).reshape(shape)
    parts: list[int] = []
    moving: list[int] = []
    wanted = {name: (before, size) for name, before, size in _SUB_AXIS.findall(along)}
    for name, text in names:
        whole = int(text)
        before, size = wanted.get(name, ("", ""))
        inner = [int(before), int(size), whole // (int(before) * int(size))] if size else [whole]
        if name in wanted:
            moving.append(len(parts) + (1 if size else 0))
        parts += inner
    split = devices.reshape(parts)
    fixed = [at for at in range(len(parts)) if at not in moving]
    ordered = split.transpose([*fixed, *moving])
    return _rows(ordered.reshape(-1, math.prod(parts[at] for at in moving)))


def _mesh_devices(ids: str | None, count: int) -> np.ndarray:
    if not ids:
        return np.arange(count)
    if found := _MESH_IDS.match(ids):
        return _iota(found[1], found[2])
    return np.array(_numbers(ids))


def _iota(dims: str, order: str | None) -> np.ndarray:
    shape = _numbers(dims)
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(_numbers(order)) if order else ids


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n.strip())


def _rows(table: np.ndarray) -> Groups:
    return tuple(tuple(int(n) for n in row) for row in table)
