"""`polyreme doctor --cluster`: how fast the devices of a job compute and reach each other, against their data sheet."""

from __future__ import annotations

import json
import math
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from polyreme import faults
from polyreme.core.engine.backend import Device
from polyreme.distributed.auto_parallel.engine.choose import cluster_of
from polyreme.distributed.comm_report.report import table
from polyreme.distributed.communication.objects import all_gather_object
from polyreme.errors import ConfigError
from polyreme.mesh import MeshShape
from polyreme.planner.cluster import Cluster
from polyreme.planner.communication import group
from polyreme.recipes.training.run import join_processes
from polyreme.units import bytes_text

LEAST_SHARE = 0.5
"""Of the data sheet's rate, or where there is none of the usual rate of such pairs, that a link must reach."""
SLOW_RANK = 1.5
"""Times the usual time of the same work that make a rank slow."""
_REPEATS = 7  # of each measurement, the best of which counts, as others may use the machine
_CHAIN = 4  # of one program, so that its dispatch does not count
_ALL_PAIRS = 32  # members up to which every pair is measured; of more, those whose distance is a power of two


@dataclass(frozen=True)
class CollectiveRate:
    """A collective over all devices.

    nbytes: on each device, of an all-gather when it is done. bandwidth: bytes/s that a device sends at the least, as
    rings do; expected: by the data sheet, None without one.
    """

    kind: str
    nbytes: int
    seconds: float
    bandwidth: float
    expected: float | None = None


@dataclass(frozen=True)
class PairRate:
    """Two ranks, or two devices of one process, that send each other at once. bandwidth: bytes/s one way."""

    first: int
    second: int
    is_near: bool
    bandwidth: float
    expected: float | None = None


@dataclass(frozen=True)
class RankRate:
    """The same product on every device of a rank, one after another: seconds of the slowest."""

    rank: int
    host: str
    seconds: float


@dataclass(frozen=True)
class ClusterReport:
    """The measurements. members: "rank" or "device", the members of pairs. findings: problems, in sentences."""

    kind: str
    num_devices: int
    members: str
    sheet: str
    collectives: tuple[CollectiveRate, ...]
    pairs: tuple[PairRate, ...]
    ranks: tuple[RankRate, ...]
    findings: tuple[str, ...]

    @property
    def is_well(self) -> bool:
        """Whether nothing is slow."""
        return not self.findings


def examine(sheet: Cluster | None = None, least: float = LEAST_SHARE) -> ClusterReport:
    """Measure the job that this process is a rank of; every rank must call it, and each gets the same report.

    sheet: the data sheet, by default that of the devices' kind, where it is known. least: share of its rates that is
    enough. Raises ConfigError for a single device, and for the sheet of another number of devices.
    """
    join_processes()
    devices = jax.devices()
    if len(devices) < 2:
        raise ConfigError(
            "doctor --cluster: one device; start it over several with polyreme launch, or on virtual ones (CPU_NUM=2)"
        )
    if sheet is not None and sheet.num_devices != len(devices):
        raise ConfigError(
            f"doctor --cluster: --sheet is of {sheet.num_devices} devices, here are {len(devices)}; describe these"
        )
    if sheet is None and devices[0].platform != "cpu":
        sheet = cluster_of(devices)
    size = 1 << 22 if devices[0].platform == "cpu" else 1 << 27
    collectives = tuple(_collective(kind, devices, size, sheet) for kind in ("all-reduce", "all-gather"))
    members = _members(devices)
    hosts: list[Any] = []
    _gather(hosts, socket.gethostname())
    near = {m: hosts[device.process_index] for m, device in enumerate(members)}
    pairs = tuple(_pairs(members, devices, near, size, sheet))
    ranks = tuple(RankRate(at, hosts[at], seconds) for at, seconds in enumerate(_compute()))
    kind = "rank" if jax.process_count() > 1 else "device"
    name = "" if sheet is None else sheet.device.name
    found = tuple(_findings(kind, collectives, pairs, ranks, least))
    return ClusterReport(devices[0].device_kind, len(devices), kind, name, collectives, pairs, ranks, found)


def _members(devices: Sequence[Device]) -> list[Device]:
    """The first device of each process; of one process, all."""
    if jax.process_count() == 1:
        return list(devices)
    return [next(d for d in devices if d.process_index == at) for at in range(jax.process_count())]


def _gather(values: list[Any], value: Any) -> None:
    """value of every rank, in order."""
    if jax.process_count() > 1:
        all_gather_object(values, value)
    else:
        values.append(value)


def _seconds(devices: Sequence[Device], body: Callable[[Any], Any], size: int) -> float:
    """Seconds of one of _CHAIN calls of body on float32[size] of each device; the best of several runs.

    All processes that have one of the devices run it as often.
    """
    mesh = Mesh(np.array(devices), ("all",))
    split = NamedSharding(mesh, P("all"))
    mine = [jax.device_put(np.zeros(size, np.float32), d) for d in devices if d.process_index == jax.process_index()]
    x = jax.make_array_from_single_device_arrays((size * len(devices),), split, mine)

    def chain(x: Any) -> Any:
        # each waits for the one before; what is added keeps them from being merged
        for _ in range(_CHAIN):
            x = x + body(x).reshape(-1)[: x.size]
        return x

    spread = jax.shard_map(chain, mesh=mesh, in_specs=P("all"), out_specs=P("all"), check_vma=False)
    program = jax.jit(spread, out_shardings=split)
    jax.block_until_ready(program(x))
    best = math.inf
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(program(x))
        best = min(best, time.perf_counter() - start)
    return best / _CHAIN


def _collective(kind: str, devices: Sequence[Device], size: int, sheet: Cluster | None) -> CollectiveRate:
    count = len(devices)
    run = jax.lax.psum if kind == "all-reduce" else jax.lax.all_gather
    share = size // 4 if kind == "all-reduce" else size // 4 // count
    mine = _seconds(devices, lambda x: run(x, "all"), share)
    seconds = _slowest(mine)
    nbytes = 4 * share * (1 if kind == "all-reduce" else count)
    sent = (2 if kind == "all-reduce" else 1) * (count - 1) / count * nbytes
    expected = None
    if sheet is not None:
        links = group(sheet, MeshShape(dp=count), ("dp",))
        expected = sent / (links.all_reduce(nbytes) if kind == "all-reduce" else links.all_gather(nbytes))
    return CollectiveRate(kind, nbytes, seconds, sent / seconds, expected)


def _slowest(seconds: float) -> float:
    values: list[Any] = []
    _gather(values, seconds)
    return max(values)


def _pairs(
    members: Sequence[Device], devices: Sequence[Device], near: Mapping[int, str], size: int, sheet: Cluster | None
) -> Iterator[PairRate]:
    measured: dict[tuple[int, int], float] = {}
    here = jax.process_index()
    for pairs in _rounds(len(members)):
        for first, second in pairs:
            two = [members[first], members[second]]
            if here in {device.process_index for device in two}:
                measured[first, second] = _seconds(
                    two, lambda x: jax.lax.ppermute(x, "all", [(0, 1), (1, 0)]), size // 4
                )
    told: list[Any] = []
    _gather(told, [[first, second, seconds] for (first, second), seconds in measured.items()])
    slowest: dict[tuple[int, int], float] = {}
    for first, second, seconds in (row for rows in told for row in rows):
        slowest[first, second] = max(seconds, slowest.get((first, second), 0.0))
    for (first, second), seconds in sorted(slowest.items()):
        places = devices.index(members[first]), devices.index(members[second])
        expected = None if sheet is None else _link_bandwidth(sheet, *places)
        yield PairRate(first, second, near[first] == near[second], size / seconds, expected)


def _rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Pairs of so many members, in rounds in which each is in one pair at most, so that no pair waits for another.

    >>> list(_rounds(3)), sum(map(len, _rounds(6))), sum(map(len, _rounds(64))) < 64 * 63 // 2
    ([[(1, 2)], [(0, 1)], [(0, 2)]], 15, True)
    """
    even = count + count % 2
    others = list(range(1, even))
    for turn in range(even - 1):
        circle = [0, *others[turn:], *others[:turn]]
        pairs = [tuple(sorted((circle[at], circle[-1 - at]))) for at in range(even // 2)]
        chosen = [(low, high) for low, high in pairs if high < count and _is_measured(high - low, count)]
        if chosen:
            yield sorted(chosen)


def _is_measured(distance: int, count: int) -> bool:
    return count <= _ALL_PAIRS or distance & (distance - 1) == 0


def _link_bandwidth(sheet: Cluster, first: int, second: int) -> float:
    """The bandwidth of the nearest link that joins both devices, bytes/s one way."""
    link = next(link for link in sheet.links if first // link.devices == second // link.devices)
    return link.bandwidth / (2 * len(link.torus)) if link.torus else link.bandwidth


def _compute() -> list[float]:
    """Seconds of a product on the slowest device of each rank."""
    seconds = []
    for device in jax.local_devices():
        is_cpu = device.platform == "cpu"
        side, dtype = (256, "float32") if is_cpu else (4096, "bfloat16")
        x = jax.device_put(jnp.zeros((side, side), dtype), device)
        program = jax.jit(lambda x: x @ x @ x @ x)
        jax.block_until_ready(program(x))
        best = math.inf
        for _ in range(_REPEATS):
            start = time.perf_counter()
            faults.point("doctor.compute")
            jax.block_until_ready(program(x))
            best = min(best, time.perf_counter() - start)
        seconds.append(best)
    values: list[Any] = []
    _gather(values, max(seconds))
    return values


def _findings(
    kind: str,
    collectives: Sequence[CollectiveRate],
    pairs: Sequence[PairRate],
    ranks: Sequence[RankRate],
    least: float,
) -> Iterator[str]:
    for rate in collectives:
        if rate.expected is not None and rate.bandwidth < least * rate.expected:
            share = rate.bandwidth / rate.expected
            yield f"{rate.kind}: {_rate(rate.bandwidth)}, {share:.0%} of what the data sheet gives"
    for pair in pairs:
        alike = [other.bandwidth for other in pairs if other.is_near == pair.is_near]
        usual = pair.expected if pair.expected is not None else statistics.median_high(alike)
        if pair.bandwidth < least * usual:
            of = "what the data sheet gives" if pair.expected is not None else "what such pairs have"
            yield (
                f"{kind}s {pair.first} and {pair.second}: {_rate(pair.bandwidth)}, {pair.bandwidth / usual:.0%} of {of}"
            )
    usual = statistics.median_low([each.seconds for each in ranks])
    for each in ranks:
        if each.seconds > SLOW_RANK * usual:
            yield (
                f"rank {each.rank} on {each.host} is slow: {1e3 * each.seconds:.3g} ms for what usually takes "
                f"{1e3 * usual:.3g} ms; look at its clocks, its temperature and what else runs there"
            )


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.3g} GB/s"


def as_text(report: ClusterReport) -> str:
    """The report as tables."""
    title = f"{report.num_devices} x {report.kind}, {len(report.ranks)} ranks; data sheet: {report.sheet or 'none'}"
    rows = [("collective", "bytes", "ms", "GB/s", "data sheet", "share")]
    rows += [
        (r.kind, bytes_text(r.nbytes), f"{1e3 * r.seconds:.3f}", f"{r.bandwidth / 1e9:.3g}", *_against(r))
        for r in report.collectives
    ]
    pairs = [(f"{report.members}s", "where", "GB/s one way", "data sheet", "share")]
    pairs += [
        (
            f"{p.first} {p.second}",
            "one machine" if p.is_near else "two machines",
            f"{p.bandwidth / 1e9:.3g}",
            *_against(p),
        )
        for p in report.pairs
    ]
    usual = statistics.median_low([each.seconds for each in report.ranks])
    ranks = [("rank", "host", "ms of a product", "times the usual")]
    ranks += [(str(r.rank), r.host, f"{1e3 * r.seconds:.3f}", f"{r.seconds / usual:.2f}") for r in report.ranks]
    blocks = [title, table(rows, right=(1, 2, 3, 4, 5)), table(pairs, right=(2, 3, 4)), table(ranks, right=(2, 3))]
    return "\n\n".join([*blocks, "\n".join(f"FAIL {each}" for each in report.findings) or "well"])


def _against(rate: CollectiveRate | PairRate) -> tuple[str, str]:
    if rate.expected is None:
        return "-", "-"
    return f"{rate.expected / 1e9:.3g}", f"{rate.bandwidth / rate.expected:.0%}"


def as_json(report: ClusterReport) -> str:
    """The report as one JSON object."""
    return json.dumps({"ok": report.is_well, **asdict(report)}, indent=1)
