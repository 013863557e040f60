"""Devices and how they are connected: what a prediction is for.

Data sheets of known kinds are in devices.yaml; `polyreme calibrate` measures a machine's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist

Curve = tuple[tuple[float, float], ...]
"""Points (x, y), x ascending; between points y is interpolated on a logarithmic x axis, outside it is the nearest y."""


@dataclass(frozen=True, slots=True)
class Link:
    """One tier of the network: how many devices it joins, bytes a second each device can send, seconds a hop.

    bandwidth counts all the links of a device at this tier together, one way. efficiency: share of the bandwidth that a
    collective reaches, by bytes of its message on one device. torus: lengths of the torus that the devices form, the
    last fastest in device order; () for a switch, which gives any two devices all the bandwidth. closes: shortest
    length at which a dim of the torus is a ring; a shorter one is a line. oversubscription: times that what devices
    may send exceeds what the switches pass on, as of a tree that narrows upwards (7 between the pods of Llama 3's
    cluster, arXiv:2407.21783, section 3.3.1), or by which other jobs' traffic slows it.
    """

    name: str
    devices: int
    bandwidth: float
    latency: float
    efficiency: Curve = ((0.0, 1.0),)
    torus: tuple[int, ...] = ()
    closes: int = 1
    oversubscription: float = 1.0


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """One device.

    flops: FLOP/s by compute dtype ("bfloat16", "float16", "float32"), dense. memory: bytes, bandwidth: bytes a second.
    matmul: share of flops that a matrix product reaches, by its FLOP; attention: likewise for fused attention, by
    FlashAttention-2; own_attention: how many times that rate kernels written for this kind have. tuned: how many times
    matmul's share products in 16 bits reach whose kernels are chosen by measurement, with the power for them.
    narrow_heads: share of attention's rate that heads of 64 numbers reach, over heads of 128. tile: rows and columns
    that a matrix unit takes at once: dims of a product are filled up to a multiple; 1 where kernels have many sizes.
    streaming: share of bandwidth that an operation limited by memory reaches, by its bytes. few: of devices that share
    their units, the share of attention's rate that so many of them reach, the others idle. launch: seconds from one
    operation to the next. host: bytes a second to and from host memory. usable: share of memory a job can use (the rest
    is the runtime's). borrowed: the kind whose curves these are, "" for its own. variation: standard deviation of the
    speed of devices of the kind, as a share of it. source: where the figures are from.
    """

    name: str
    flops: dict[str, float] = field(hash=False)
    memory: float
    bandwidth: float
    matmul: Curve
    attention: Curve
    streaming: Curve = ((0.0, 0.85),)
    few: Curve = ((1.0, 1.0),)
    usable: float = 0.92
    launch: float = 5e-6
    host: float = 25e9
    own_attention: float = 1.0
    tuned: float = 1.0
    narrow_heads: float = 1.0
    tile: int = 1
    borrowed: str = ""
    variation: float = 0.0
    source: str = ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """num_devices of one kind, joined by links from the nearest (inside a node) to the farthest.

    shared: devices that share one set of compute units, as virtual CPU devices share the machine's cores: together they
    are as fast as one; 1 for real devices. flops and bandwidth of such a kind are those of the units, measured with all
    devices busy; what every device repeats (the update of a replicated parameter) costs `shared` times. Shared devices
    also run one program at a time (docs/decisions/0006): pipeline stages do not overlap, so there is no bubble, and the
    step is the sum of all stages' tasks, each of which has all units for its num_devices / pp devices.
    task: seconds of the host to dispatch one task of a pipeline, which counts where programs run one at a time.
    """

    device: DeviceKind
    num_devices: int
    links: tuple[Link, ...]
    shared: int = 1
    task: float = 0.0


TOGETHER = 8
"""Devices of the smallest runs that curves are of: the slowest of so many is in them."""


def slowness(cluster: Cluster) -> float:
    """How many times as long the slowest of the devices computes as the slowest of TOGETHER: all wait for it in every
    step, as gradients are summed or activations passed on.

    >>> from polyreme.planner import cluster_of_kind
    >>> [round(slowness(cluster_of_kind("h100", n)), 3) for n in (8, 64, 1024)]
    [1.0, 1.013, 1.026]
    """
    if cluster.shared > 1 or cluster.num_devices <= TOGETHER:
        return 1.0
    sigma = cluster.device.variation
    return (1 + sigma * _largest(cluster.num_devices)) / (1 + sigma * _largest(TOGETHER))


def _largest(count: int) -> float:
    """The largest of so many standard normal numbers, on the mean. Source: Blom, Statistical Estimates and Transformed
    Beta-Variables, 1958."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def at(curve: Curve, x: float) -> float:
    """The curve's y at x: between two points on a logarithmic x axis, outside them the nearest point's.

    >>> at(((1.0, 0.2), (100.0, 0.8)), 10.0)
    0.5
    """
    if x <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x <= x1:
            return y0 + (y1 - y0) * math.log(x / x0) / math.log(x1 / x0) if x0 > 0 else y1
    return curve[-1][1]
