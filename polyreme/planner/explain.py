"""When nothing fits: the cheapest changes after which something does.

Floor: 1.  Never imports: jax.  Each change is searched like the question itself; none is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from polyreme.errors import ConfigError
from polyreme.planner.calibration import resized
from polyreme.planner.cluster import Cluster
from polyreme.planner.devices import cluster_of_kind, device_kind, device_kinds
from polyreme.planner.graph import Graph
from polyreme.planner.model_shape import ModelShape
from polyreme.planner.prediction import Training
from polyreme.planner.search import Ranked, Refuse, fits_at_all, search
from polyreme.planner.space import Space

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
    model: ModelShape,
    cluster: Cluster,
    batch: int,
    training: Training,
    space: Space,
    refuse: Refuse | None = None,
    most: int = 3,
) -> tuple[Change, ...]:
    """The changes, at most `most`, that cost the fewest device seconds a step, cheapest first; () if none helps.

    Looked at: what the space leaves out (one thing at a time), more devices of the kind (the fewest that do), kinds of
    device with more memory, and arithmetic in 16 bits.
    """
    found: list[Change] = []
    for what, asked, arithmetic, allowed in _asked(model, cluster, batch, training, space, refuse):
        best = _best(model, asked, batch, arithmetic, allowed, refuse)
        if best is not None:
            found.append(Change(what, asked.num_devices, best))
    found.sort(key=lambda change: change.devices * change.best.prediction.step_seconds)
    return tuple(found[:most])


def _best(
    model: ModelShape | Graph, cluster: Cluster, batch: int, training: Training, space: Space, refuse: Refuse | None
) -> Ranked | None:
    found = search(model, cluster, batch, training, space, top=1, refuse=refuse)
    return found.plans[0] if found.plans else None


_Asked = tuple[str, Cluster, Training, Space]


def _asked(
    model: ModelShape, cluster: Cluster, batch: int, training: Training, space: Space, refuse: Refuse | None
) -> Iterator[_Asked]:
    whole = Space()
    for field in fields(Space):
        if field.name != "axes" and getattr(space, field.name) != getattr(whole, field.name):
            allowed = replace(space, **{field.name: getattr(whole, field.name)})
            yield f"allow {_WORDS[field.name]}", cluster, training, allowed
    for axis in ("pp", "mp", "sharding", "sep"):
        if axis not in space.axes:
            yield f"allow {axis}", cluster, training, replace(space, axes=(*space.axes, axis))
    if training.dtype == "float32":
        yield "train.amp_level=O2 (bfloat16)", cluster, replace(training, dtype="bfloat16", master=True), space
    yield from _other_kinds(cluster, training, space)
    count = _fewest(lambda asked: fits_at_all(model, asked, batch, training, space, refuse), cluster)
    if count:
        yield f"{count} devices instead of {cluster.num_devices}", _of_size(cluster, count), training, space


def _other_kinds(cluster: Cluster, training: Training, space: Space) -> Iterator[_Asked]:
    """Kinds with more memory whose name begins alike, as GPUs and TPUs differ in more."""
    if cluster.shared > 1:
        return
    is_tpu = bool(cluster.links) and bool(cluster.links[0].torus)
    larger = []
    for name in device_kinds():
        kind = device_kind(name)
        if kind.memory > cluster.device.memory * 1.05 and name.startswith("tpu") is is_tpu:
            larger.append((kind.memory, name))
    for _, name in sorted(larger):
        try:
            yield f"devices of kind {name}", cluster_of_kind(name, cluster.num_devices), training, space
        except ConfigError:  # no slice of so many
            continue


def _fewest(fits: Callable[[Cluster], bool], cluster: Cluster) -> int:
    """Fewest devices at which something fits, to an eighth of what is between a half and the whole; 0 if none do."""
    count = failed = cluster.num_devices
    while (count := 2 * count) <= cluster.num_devices * _MOST_TIMES:
        if fits(_of_size(cluster, count)):
            # whole nodes, and numbers that a batch may divide over
            unit = max(1, (count - failed) // 8)
            return next((n for n in range(failed + unit, count, unit) if fits(_of_size(cluster, n))), count)
        failed = count
    return 0


def _of_size(cluster: Cluster, count: int) -> Cluster:
    """A cluster like this one; of a torus the shortest lengths grow."""
    if cluster.shared > 1:
        return resized(cluster, count)
    links = []
    for link in cluster.links:
        lengths = list(link.torus)
        while lengths and math.prod(lengths) < count:
            at = lengths.index(min(lengths))
            lengths[at] *= 2
        devices = max(link.devices, math.prod(lengths)) if lengths else link.devices
        links.append(replace(link, devices=devices, torus=tuple(lengths)))
    if links and links[-1].devices < count:
        links[-1] = replace(links[-1], devices=count)
    return replace(cluster, num_devices=count, links=tuple(links))
