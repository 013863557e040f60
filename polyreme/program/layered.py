"""Where boxes and edges of a graph go on paper: top down in layers, so that no edge crosses a box.

Source: Sugiyama, Tagawa and Toda 1981: layers by longest path, an order of few crossings by barycentres, and
places nearest to the neighbours' (isotonic regression). An edge over several layers gets a slot in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

GAP_X, GAP_Y = 26.0, 34.0
_SLOT = 8.0  # width of an edge that passes a layer
_SWEEPS = 12


@dataclass
class Box:
    """A box of this size; x and y: its left top corner, once placed. last: below all others."""

    width: float
    height: float
    last: bool = False
    x: float = 0.0
    y: float = 0.0
    layer: int = 0

    @property
    def centre(self) -> float:
        return self.x + self.width / 2


@dataclass
class GraphLayout:
    """The size of a graph on paper, and for each edge a line through points (x, y): straight down to every second one,
    bent in the gaps between layers.
    """

    width: float
    height: float
    lines: list[list[tuple[float, float]]] = field(default_factory=list)


def place(boxes: Sequence[Box], edges: Sequence[tuple[int, int]]) -> GraphLayout:
    """Give each box its place; edges: (from, to), forward in the order of boxes."""
    _layer(boxes, edges)
    slots, chains = _slots(boxes, edges)
    every = [*boxes, *slots]
    links = [(a, b) for chain in chains for a, b in pairwise(chain)]
    rows = _order(every, links)
    _spread(rows, every, links)
    left = min((b.x for b in every), default=0.0)
    y, tops, heights = 0.0, [], []
    for row in rows:
        tops.append(y)
        heights.append(max((every[i].height for i in row), default=0.0))
        y += heights[-1] + GAP_Y
    for box in every:
        box.x -= left
        box.y = tops[box.layer]
    ends = _entries(chains, every)
    lines = [_line(chain, every, tops, heights, ends[i]) for i, chain in enumerate(chains)]
    return GraphLayout(max((b.x + b.width for b in every), default=0.0), max(y - GAP_Y, 0.0), lines)


def _layer(boxes: Sequence[Box], edges: Sequence[tuple[int, int]]) -> None:
    for a, b in sorted(edges, key=lambda e: e[1]):
        boxes[b].layer = max(boxes[b].layer, boxes[a].layer + 1)
    targets = {b for _, b in edges}
    for at, box in enumerate(boxes):
        below = [boxes[b].layer for a, b in edges if a == at]
        if at not in targets and below:
            box.layer = min(below) - 1  # what begins stands just above what uses it
    bottom = max((box.layer for box in boxes if not box.last), default=-1)
    for box in boxes:
        if box.last:
            box.layer = bottom + 1


def _slots(boxes: Sequence[Box], edges: Sequence[tuple[int, int]]) -> tuple[list[Box], list[list[int]]]:
    """(slots for edges that pass layers, for each edge the boxes and slots along it)."""
    slots: list[Box] = []
    chains = []
    for a, b in edges:
        between = range(boxes[a].layer + 1, boxes[b].layer)
        first = len(boxes) + len(slots)
        slots += [Box(_SLOT, 0.0, layer=layer) for layer in between]
        chains.append([a, *range(first, first + len(between)), b])
    return slots, chains


def _order(every: Sequence[Box], links: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Boxes of each layer from left to right."""
    rows: list[list[int]] = [[] for _ in range(max((b.layer for b in every), default=-1) + 1)]
    for index, box in enumerate(every):
        rows[box.layer].append(index)
    above: dict[int, list[int]] = {index: [] for index in range(len(every))}
    below: dict[int, list[int]] = {index: [] for index in range(len(every))}
    for a, b in links:
        above[b].append(a)
        below[a].append(b)
    for sweep in range(_SWEEPS):
        near, order = (above, rows) if sweep % 2 == 0 else (below, rows[::-1])
        for row in order:
            place_of = {index: i for other in rows for i, index in enumerate(other)}
            weight = {
                index: sum(place_of[n] for n in near[index]) / len(near[index]) if near[index] else place_of[index]
                for index in row
            }
            row.sort(key=weight.__getitem__)
    return rows


def _spread(rows: Sequence[Sequence[int]], every: Sequence[Box], links: Sequence[tuple[int, int]]) -> None:
    """Give each box an x as near as possible to its neighbours'."""
    near: dict[int, list[int]] = {index: [] for index in range(len(every))}
    for a, b in links:
        near[a].append(b)
        near[b].append(a)
    for row in rows:
        x = 0.0
        for index in row:
            every[index].x = x
            x += every[index].width + GAP_X
    for sweep in range(2 * _SWEEPS):
        for row in rows if sweep % 2 == 0 else rows[::-1]:
            side = -1 if sweep % 2 == 0 else 1
            wanted, offsets, x = [], [], 0.0
            for index in row:
                box = every[index]
                sides = [n for n in near[index] if (every[n].layer - box.layer) * side > 0] or near[index]
                centre = sum(every[n].centre for n in sides) / len(sides) if sides else box.centre
                wanted.append(centre - box.width / 2 - x)
                offsets.append(x)
                x += box.width + GAP_X
            for index, moved, offset in zip(row, _increasing(wanted), offsets, strict=True):
                every[index].x = moved + offset


def _increasing(values: Sequence[float]) -> list[float]:
    """The non-decreasing numbers nearest to values (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            other, many = pools.pop()
            mean, count = (mean * count + other * many) / (count + many), count + many
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _entries(chains: Sequence[Sequence[int]], every: Sequence[Box]) -> list[float]:
    """For each edge the x at which it enters its target: those from further left enter further left."""
    result = [0.0] * len(chains)
    for target in {chain[-1] for chain in chains}:
        into = sorted((i for i, c in enumerate(chains) if c[-1] == target), key=lambda i: every[chains[i][-2]].centre)
        box = every[target]
        for rank, i in enumerate(into):
            result[i] = box.x + box.width * (0.2 + 0.6 * (rank + 1) / (len(into) + 1))
    return result


def _line(
    chain: Sequence[int], every: Sequence[Box], tops: Sequence[float], heights: Sequence[float], end: float
) -> list[tuple[float, float]]:
    source, target = every[chain[0]], every[chain[-1]]
    points = [(source.centre, source.y + source.height), (source.centre, tops[source.layer] + heights[source.layer])]
    for at in chain[1:-1]:
        slot = every[at]
        points += [(slot.centre, tops[slot.layer]), (slot.centre, tops[slot.layer] + heights[slot.layer])]
    return [*points, (end, target.y)]
