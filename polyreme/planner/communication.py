"""Seconds of collectives over the links that a group of devices really spans.

Bytes are those of ring algorithms: of V bytes over n devices an all-gather or reduce-scatter sends (n - 1) / n V from
each, an all-reduce twice that, an all-to-all (n - 1) / n of what one holds. Sources: Patarasuk and Yuan, JPDC 69(2),
2009; Thakur et al., IJHPCA 19(1), 2005.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from polyreme.errors import ConfigError
from polyreme.mesh import MeshShape
from polyreme.planner.cluster import Cluster, Link, at


class Tier(NamedTuple):
    """A link, how many parties meet over it, and how many devices of the group each party has.

    share: of the link's bandwidth that a ring of this group can use: a torus gives each of its dims a part. side: the
    longest way along one dim of a torus, devices.
    """

    link: Link
    parties: int
    inside: int
    share: float = 1.0
    side: int = 1


class LinkGroup(NamedTuple):
    """Devices that differ only along some mesh axes, as the tiers of links they span, nearest first.

    on_processor: devices that share their units. XLA's compiler for them makes a reduce-scatter of an all-reduce and a
    cut, and does not join gathers, as it does sums; its collectives read all bytes of every device, own ones too.
    """

    size: int
    tiers: tuple[Tier, ...]
    on_processor: bool = False

    def all_gather(self, nbytes: float, arrays: int = 1) -> float:
        """Seconds until every device has the nbytes, of so many arrays, that the group holds in parts."""
        if self.size == 1 or nbytes <= 0:
            return 0.0
        messages = arrays if self.on_processor else 1
        return messages * (max(self._moved(nbytes / messages, t) for t in self.tiers) + self._round())

    def _round(self) -> float:
        """Seconds of the hops of a ring through all devices: from party to party of each tier, and inside each."""
        seconds, crossed = 0.0, 1
        for tier in reversed(self.tiers):
            seconds += crossed * (tier.parties - 1) * tier.link.latency
            crossed *= tier.parties
        return seconds

    def reduce_scatter(self, nbytes: float) -> float:
        """Seconds until every device has its part of the sum of nbytes on each."""
        return self.all_reduce(nbytes) if self.on_processor else self.all_gather(nbytes)

    def all_reduce(self, nbytes: float) -> float:
        """Seconds until every device has the sum of nbytes on each; far tiers by trees, whose depth is a logarithm."""
        if self.size == 1 or nbytes <= 0:
            return 0.0
        hops = sum(2 * min(t.parties - 1, 2 * math.log2(t.parties)) * t.link.latency for t in self.tiers)
        return 2 * max(self._moved(nbytes, t) for t in self.tiers) + hops

    def all_to_all(self, nbytes: float, choices: float = 0.0, reach: float = 1.0) -> float:
        """Seconds until every device has sent an equal part of its nbytes to every other.

        choices: copies of each row among these bytes, which a dispatcher that passes rows on inside a node sends to
        each node once, and there to each device once (arXiv:2412.19437, section 3.2.2; DeepEP); 0: it does not. reach:
        share of the devices that the copies of a row go to.
        """
        if self.size == 1 or nbytes <= 0:
            return 0.0
        seconds = 0.0
        for place, t in enumerate(self.tiers):
            most = max(1.0, (t.parties if place else self.size) * reach)
            part = _distinct(most, choices) / choices if choices > 1 else 1.0
            if t.link.torus:  # a message crosses a quarter of each ring on average: side / 8 of the bytes each way
                crossing = nbytes * t.side / 8 / (t.link.bandwidth / (2 * len(t.link.torus)))
            else:  # what goes to the other parties behind this link, of all the group's devices
                crossing = nbytes * (t.parties - 1) * t.inside / self.size / t.link.bandwidth
            crossing *= part
            seconds += crossing / at(t.link.efficiency, nbytes) + t.link.latency
        return seconds

    def send(self, nbytes: float) -> float:
        """Seconds to the next device of the group, over the farthest link that any pair of neighbours has."""
        if self.size == 1 or nbytes <= 0:
            return 0.0
        link = self.tiers[-1].link
        # a torus has one link to a neighbour, of two for each of its dims
        width = link.bandwidth / (2 * len(link.torus)) if link.torus else link.bandwidth
        return link.latency + nbytes / (width * at(link.efficiency, nbytes))

    def _moved(self, nbytes: float, tier: Tier) -> float:
        """As many rings as a party has devices, each over another's way out, carry a part each."""
        sent = nbytes * (1 if self.on_processor else (self.size - 1) / self.size) / tier.inside
        return sent / (tier.link.bandwidth * tier.share * at(tier.link.efficiency, nbytes))


def _distinct(parties: float, choices: float) -> float:
    """Of so many parties, those that a row with so many choices among them goes to, on the mean.

    >>> _distinct(8, 1), round(_distinct(8, 8), 2)
    (1.0, 5.25)
    """
    return parties * (1 - (1 - 1 / parties) ** choices)


class Neighbours(NamedTuple):
    """Of the devices along a mesh axis so many, every `stride`-th."""

    size: int
    stride: int = 1


def group(cluster: Cluster, mesh: MeshShape, axes: Iterable[str], among: Neighbours | None = None) -> LinkGroup:
    """The group of the devices along these mesh axes; along the last of them, that of these neighbours.

    Raises ConfigError for a mesh of more devices than the cluster's links join.
    """
    live = tuple(axis for axis in mesh.order if axis in set(axes) and mesh.degree(axis) > 1)
    return _group(cluster, mesh, live, among)


@lru_cache(maxsize=16384)
def _group(cluster: Cluster, mesh: MeshShape, axes: tuple[str, ...], among: Neighbours | None) -> LinkGroup:
    strides = mesh.strides
    lines = sorted((strides[axis], mesh.degree(axis)) for axis in axes)
    if among is not None:
        lines = [(strides[axes[-1]] * among.stride, among.size)]
    size = math.prod(degree for _, degree in lines)
    if size == 1:
        return LinkGroup(1, ())
    tiers, inside = [], 1
    is_shared = cluster.shared > 1
    for link in cluster.links:
        if is_shared:  # one stage works at a time, and has what all devices together were measured to have
            link = replace(link, bandwidth=link.bandwidth * mesh.pp)
        if link.oversubscription != 1:
            link = replace(link, bandwidth=link.bandwidth / link.oversubscription)
        reached = _members(lines, link.devices)
        if reached > inside:
            tiers.append(Tier(link, reached // inside, inside, *_share(link, lines)))
            inside = reached
    if inside < size:
        raise ConfigError(
            f"mesh {mesh} has {mesh.size} devices, but the links of the cluster of {cluster.device.name} join "
            f"{max((link.devices for link in cluster.links), default=1)}; use fewer devices, or give the cluster a "
            "link that joins more"
        )
    return LinkGroup(size, tuple(tiers), is_shared)


def _members(lines: list[tuple[int, int]], devices: int) -> int:
    """How many of the group lie within the first `devices` devices."""
    return math.prod(min(degree, max(1, -(-devices // stride))) for stride, degree in lines)


def _share(link: Link, lines: list[tuple[int, int]]) -> tuple[float, int]:
    """Part of a torus's bandwidth that a ring of the group has, and the longest way along a dim.

    Of each dim it runs along it has both ways round if it covers the dim and the dim closes, else one.
    """
    if not link.torus:
        return 1.0, 1
    share, side, step = 0.0, 1, 1
    for length in reversed(link.torus):
        covered = math.prod(
            max(1, min(stride * degree, step * length) // max(stride, step)) for stride, degree in lines
        )
        if covered > 1:
            share += 1.0 if covered == length and length >= link.closes else 0.5
            side = max(side, covered)
        step *= length
    return max(share, 0.5) / len(link.torus), side
