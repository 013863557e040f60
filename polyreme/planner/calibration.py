"""From what was measured on a machine to a Cluster, and where such a Cluster is kept.

The measuring is in recipes/planning/calibrate.py; the file is a cluster file (cluster_file.py).
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import yaml

from polyreme import flags
from polyreme.errors import ConfigError
from polyreme.planner.cluster import Cluster, Curve, DeviceKind, Link

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Measured:
    """What recipes/planning/calibrate.py finds. Rates are of all devices together, sizes those of one device.

    matmul, by dtype, and attention: (FLOP of one call, FLOP/s). streaming: (bytes moved, bytes/s). few: (devices at
    work, FLOP/s of attention on them together), nothing where devices have units of their own. all_reduce,
    all_gather: (bytes of the result, seconds), nothing on one device. launch: seconds from one operation of a program
    to the next. task: seconds to dispatch a task of a pipeline. memory: bytes of one device.
    """

    kind: str
    platform: str
    num_devices: int
    memory: float
    matmul: Mapping[str, Points]
    attention: Points
    streaming: Points
    few: Points
    all_reduce: Points
    all_gather: Points
    launch: float
    task: float


def calibration_file() -> Path:
    """Where `polyreme calibrate` writes, and `polyreme plan --devices` looks."""
    return flags.cache_home() / "polyreme" / "calibration.yaml"


def cluster_of(measured: Measured) -> Cluster:
    """The machine that was measured. Processors' devices share their units: their rates are those of all together.

    The shape of the matmul curve is that of the first dtype measured, the peak of each dtype its own.
    """
    count, is_shared = measured.num_devices, measured.platform == "cpu" and measured.num_devices > 1
    parts = 1 if is_shared else count
    peaks = {dtype: max(rate for _, rate in points) / parts for dtype, points in measured.matmul.items()}
    peaks.setdefault("float16", peaks["float32"])  # a processor computes in it by way of float32
    first = next(iter(measured.matmul))
    bandwidth = max(rate for _, rate in measured.streaming) / parts
    device = DeviceKind(
        name=measured.kind,
        flops=peaks,
        memory=measured.memory,
        bandwidth=bandwidth,
        matmul=_rising(_share(measured.matmul[first], peaks[first] * parts)),
        attention=_rising(_share(measured.attention, peaks[first] * parts)),
        few=_few(measured.few) if is_shared else DeviceKind.few,
        streaming=_share(measured.streaming, bandwidth * parts),
        launch=measured.launch,
        host=bandwidth if measured.platform == "cpu" else DeviceKind.host,
        source="polyreme calibrate",
    )
    links = (_link(measured),) if count > 1 else ()
    return Cluster(device, count, links, shared=count if is_shared else 1, task=measured.task)


def declared(num_devices: int) -> Cluster:
    """A processor that nobody has measured, of two cores or so: figures of the right size, to compare plans by."""
    curve = ((1e5, 0.2), (1e6, 0.6), (1e7, 1.0), (1e9, 1.0))
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    device = DeviceKind(
        name="cpu",
        flops={"float32": 2e11, "bfloat16": 1e11, "float16": 1e11},
        memory=float(pages),
        bandwidth=2e10,
        matmul=curve,
        attention=tuple((x, y / 4) for x, y in curve),
        streaming=((3e4, 0.2), (3e5, 0.7), (3e6, 1.0)),
        launch=5e-6,
        host=2e10,
        source="declared; `polyreme calibrate` measures this machine",
    )
    link = Link("machine", 1, 1.5e9, 1e-5, ((1e4, 0.3), (1e6, 1.0)))
    return resized(Cluster(device, 1, (link,), shared=1, task=1e-4), num_devices)


def resized(cluster: Cluster, num_devices: int) -> Cluster:
    """The same machine with another number of devices: of a processor any, else no more than were measured.

    The processor's memory is the devices' together. Raises ConfigError for more devices than there are.
    """
    is_processor = "cpu" in cluster.device.name.lower()
    if num_devices > cluster.num_devices and not is_processor:
        raise ConfigError(
            f"{num_devices} devices, but the calibrated machine has {cluster.num_devices} of kind "
            f"{cluster.device.name!r}; describe a larger cluster in a file for --cluster"
        )
    if not is_processor:
        return replace(cluster, num_devices=num_devices)
    memory = cluster.device.memory * cluster.num_devices / num_devices
    links = tuple(replace(link, devices=max(num_devices, 2)) for link in cluster.links)
    device = replace(cluster.device, memory=memory)
    return replace(cluster, device=device, num_devices=num_devices, links=links, shared=num_devices)


def to_yaml(cluster: Cluster) -> str:
    """A cluster file with every figure spelled out: what cluster_file.read reads back to an equal Cluster."""
    values = {
        "device": _plain(cluster.device),
        "devices_per_node": cluster.num_devices,
        "nodes": 1,
        "links": [_plain(link) for link in cluster.links],
        "shared": cluster.shared,
        "task": cluster.task,
    }
    return yaml.safe_dump(values, sort_keys=False, default_flow_style=None)


def _plain(value: DeviceKind | Link) -> dict[str, object]:
    found = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: _list(each) if isinstance(each, tuple) else each for name, each in found.items()}


def _list(points: tuple) -> list:
    return [list(point) if isinstance(point, tuple) else point for point in points]


def _share(points: Points, peak: float) -> Curve:
    return tuple((size, round(min(1.0, rate / peak), 4)) for size, rate in points)


def _few(points: Points) -> Curve:
    """Share of the rate of all devices that fewer reach."""
    return _rising(_share(points, points[-1][1])) if points else DeviceKind.few


def _rising(curve: Curve) -> Curve:
    """A larger product can be done in parts, so where one was measured slower that was the cache, or other work."""
    shares = itertools.accumulate((share for _, share in curve), max)
    return tuple((size, share) for (size, _), share in zip(curve, shares, strict=True))


def _link(measured: Measured) -> Link:
    """One tier over all devices: a hop's time from the smallest collectives, bandwidth from what larger ones take.

    Hops and bytes are those of planner/communication.py, which reads the figures.
    """
    n = measured.num_devices
    sent = 1 if measured.platform == "cpu" else (n - 1) / n
    hops = (2 * min(n - 1, 2 * math.log2(n)), n - 1)  # of an all-reduce, of an all-gather
    smallest = (measured.all_reduce[0][1], measured.all_gather[0][1])
    latency = sum(seconds / count for seconds, count in zip(smallest, hops, strict=True)) / 2
    rates = []
    for (nbytes, reducing), (_, gathering) in zip(measured.all_reduce[1:], measured.all_gather[1:], strict=True):
        # a noisy small one may take less than its hops: what is left for its bytes is never nothing
        seconds = [max(t - h * latency, 0.2 * t) for t, h in zip((reducing, gathering), hops, strict=True)]
        # an all-reduce moves the bytes twice; one curve serves both kinds, so it is of the two together
        rates.append((nbytes, 3 * sent * nbytes / sum(seconds)))
    bandwidth = max(rate for _, rate in rates)
    return Link("machine", n, bandwidth, latency, _share(rates, bandwidth))
