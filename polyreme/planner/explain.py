"""When nothing fits: the cheapest changes after which something does.

Each change is searched like the question itself; none is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from polyreme.errors import ConfigError
from polyreme.mesh.axes import AXES
from polyreme.planner.calibration import resized
from polyreme.planner.cluster import Cluster, Link
from polyreme.planner.devices import check_slice, cluster_of_kind, device_kind, device_kinds, possible_slices, torus_of
from polyreme.planner.graph import ModelGraph
from polyreme.planner.model_shape import ModelShape
from polyreme.planner.prediction import Training
from polyreme.planner.search import Ranked, Refuse, fits_at_all, search
from polyreme.planner.space import Refused, Space, shapes

_MOST_TIMES = 64  # times the devices asked for; who is that far off has another model in mind

_WORDS = {
    "recompute": "recompute",
    "offload": "offload to host memory",
    "sharding_stages": "sharding of gradients and parameters (stages 2 and 3)",
    "schedules": "other schedules",
    "microbatches": "other numbers of microbatches",
    "sequence_parallel": "sequence parallelism",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One change to the question, and the best plan after it."""

    what: str
    devices: int
    best: Ranked


def changes(
    model: ModelShape | ModelGraph,
    cluster: Cluster,
    batch: int,
    training: Training,
    space: Space,
    refuse: Refuse | None = None,
    most: int = 3,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[Change, ...]:
    """The cheapest changes, at most `most`: settings first, then devices, by device seconds a step; () if none helps.

    Looked at: what the space leaves out (one thing at a time), more devices of the kind (the fewest that do), kinds of
    device with more memory, and arithmetic in 16 bits. report is called with a line about each.
    """
    result: list[Change] = []
    for what, asked, arithmetic, allowed in _asked(model, cluster, batch, training, space, refuse):
        report(f"nothing fits; trying: {what}")
        best = _best(model, asked, batch, arithmetic, allowed, refuse)
        if best is not None:
            result.append(Change(what, asked.num_devices, best))
    return tuple(sorted(result, key=lambda change: _cost(change, cluster))[:most])


def nearest_counts(
    model: ModelShape | ModelGraph, cluster: Cluster, batch: int, training: Training, space: Space
) -> tuple[int | None, int | None]:
    """(fewer, more) devices nearest to the cluster's for which some mesh divides model and batch; None where none of
    the next _NEAREST counts does."""
    graph = model.graph(training.attention) if isinstance(model, ModelShape) else model

    def divides(count: int) -> bool:
        try:
            asked = of_size(cluster, count)
        except ConfigError:
            return False
        return next(shapes(graph, asked, batch, space, Refused(), training.cut), None) is not None

    start = cluster.num_devices
    fewer = next((n for n in range(start - 1, max(0, start - _NEAREST), -1) if divides(n)), None)
    return fewer, next((n for n in range(start + 1, start + _NEAREST) if divides(n)), None)


_NEAREST = 300


def _cost(change: Change, cluster: Cluster) -> tuple[bool, bool, float]:
    """Other settings before more of the same devices, those before other devices; then device seconds of a step."""
    return (
        " of kind " in change.what,
        change.devices != cluster.num_devices,
        change.devices * change.best.prediction.step_seconds,
    )


def _best(
    model: ModelShape | ModelGraph,
    cluster: Cluster,
    batch: int,
    training: Training,
    space: Space,
    refuse: Refuse | None,
) -> Ranked | None:
    found = search(model, cluster, batch, training, space, top=1, refuse=refuse)
    return found.plans[0] if found.plans else None


_Asked = tuple[str, Cluster, Training, Space]


def _asked(
    model: ModelShape | ModelGraph,
    cluster: Cluster,
    batch: int,
    training: Training,
    space: Space,
    refuse: Refuse | None,
) -> Iterator[_Asked]:
    allowed = list(_allowed(space))
    if len(allowed) > 1:
        allowed.append((" and ".join(what for what, _ in allowed), _join(space, [each for _, each in allowed])))
    for what, wider in allowed:
        yield f"allow {what}", cluster, training, wider
    if training.dtype == "float32":
        yield "train.amp_level=O2 (bfloat16)", cluster, replace(training, dtype="bfloat16", master=True), space
    for name, like in (("", cluster), *_other_kinds(cluster, training)):
        count = _fewest(lambda asked: fits_at_all(model, asked, batch, training, space, refuse), like)
        words = f"{count} devices instead of {cluster.num_devices}" if count != cluster.num_devices else ""
        kind = f"devices of kind {name}" if name else ""
        if count and (words or kind):
            both = f"{words}, of kind {name}" if words and kind else words or kind
            asked = of_size(like, count)
            slices = count // asked.links[0].devices if asked.links and asked.links[0].torus else 1
            yield both + (f", in {slices} slices" if slices > 1 else ""), asked, training, space


def _allowed(space: Space) -> Iterator[tuple[str, Space]]:
    """What the space leaves out, and the space with it."""
    whole = Space()
    for field in fields(Space):
        # the other fields say what the devices cannot do, which no change brings
        if field.name in _WORDS and getattr(space, field.name) != getattr(whole, field.name):
            yield _WORDS[field.name], replace(space, **{field.name: getattr(whole, field.name)})
    for axis in ("pp", "mp", "sharding", "sep"):
        if axis not in space.axes:
            yield axis, replace(space, axes=(*space.axes, axis))


def _join(space: Space, wider: list[Space]) -> Space:
    """Everything that any of the spaces allows more than `space`."""
    joined = space
    for each in wider:
        for field in fields(Space):
            if getattr(each, field.name) != getattr(space, field.name) and field.name != "axes":
                joined = replace(joined, **{field.name: getattr(each, field.name)})
        joined = replace(joined, axes=tuple(axis for axis in AXES if axis in (*joined.axes, *each.axes)))
    return joined


def _other_kinds(cluster: Cluster, training: Training) -> Iterator[tuple[str, Cluster]]:
    """Kinds with more memory that have units for the dtypes, GPUs for GPUs and TPUs for TPUs, least memory first."""
    if cluster.shared > 1:
        return
    is_tpu = bool(cluster.links) and bool(cluster.links[0].torus)
    dtypes = {training.dtype, training.products or training.dtype}
    kinds = sorted((device_kind(name).memory, name) for name in device_kinds() if dtypes <= {*device_kind(name).flops})
    for memory, name in kinds:
        if memory > cluster.device.memory * 1.05 and name.startswith("tpu") is is_tpu:
            try:
                check_slice(name, cluster.num_devices)
                yield name, cluster_of_kind(name, cluster.num_devices)
            except ConfigError:  # no slice of so many
                continue


def _fewest(fits: Callable[[Cluster], bool], cluster: Cluster) -> int:
    """Fewest devices at which something fits: of a torus the number doubles; else whole machines are tried, eight steps
    between a half and the whole. 0 if none of up to _MOST_TIMES as many do."""
    node = cluster.links[0].devices if cluster.links and not cluster.links[0].torus else 0
    if fits(cluster):
        return cluster.num_devices
    count = failed = cluster.num_devices
    while (count := 2 * count) <= cluster.num_devices * _MOST_TIMES:
        try:
            larger = of_size(cluster, count)
        except ConfigError:  # no slice of so many
            continue
        if fits(larger):
            unit = -(-(count - failed) // (8 * node)) * node if node and failed % node == 0 else count
            return next((n for n in range(failed + unit, count, unit) if fits(of_size(cluster, n))), count)
        failed = count
    return 0


def of_size(cluster: Cluster, count: int) -> Cluster:
    """A cluster like this one with another number of devices; of a TPU one slice of so many, or several of the largest
    that divides them, and of a torus that is not known the shortest lengths grow. Raises ConfigError if there are no
    such slices."""
    if count == cluster.num_devices:
        return cluster
    if cluster.shared > 1:
        return resized(cluster, count)
    links = [_grown(link, cluster, count) if link.torus else link for link in cluster.links]
    if links and links[-1].devices < count:
        links[-1] = replace(links[-1], devices=count)
    return replace(cluster, num_devices=count, links=tuple(links))


def _grown(link: Link, cluster: Cluster, count: int) -> Link:
    """The link whose torus has so many devices, or a slice of them."""
    try:
        sizes = [math.prod(each) for each in possible_slices(cluster.device.name)]
    except ConfigError:  # a device that a cluster file describes
        lengths = list(link.torus)
        while math.prod(lengths) < count:
            lengths[lengths.index(min(lengths))] *= 2
        return replace(link, devices=math.prod(lengths), torus=tuple(lengths))
    check_slice(cluster.device.name, count)
    size = count if count in sizes else max(n for n in sizes if count % n == 0)
    if size < count and link is cluster.links[-1]:
        raise ConfigError(f"{count} devices are {count // size} slices, which no link joins; describe one in links")
    return replace(link, devices=size, torus=torus_of(size, len(link.torus)))
