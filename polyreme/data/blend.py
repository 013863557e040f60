"""Several sources of samples read by weights: the source of a sample, and which of its samples, by its number alone.

Nothing is stored: a tree of the sources halves the stream at each node by rounding, so that the n-th sample is found in
as many steps as the tree is deep, for any n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Any

import xxhash

from polyreme.errors import ConfigError
from polyreme.io.sampler import EpochSampler

_EXHAUSTIVE = 7  # sources among which every tree is looked at: 3**n pairs of halves
_ROUNDS = 6


class Blend:
    """The order in which sources take turns. weights: above 0, of any sum; a float counts as the decimal it shows as.

    Of the first n samples source i has n w_i / sum(w), give or take `bound`: at most 1 for up to four sources and for
    most weights of more; up to 1.13 was seen for twenty sources of random weights. Raises ConfigError for weights that
    are not finite and above 0.

    >>> blend = Blend([0.7, 0.3])
    >>> [blend.locate(n) for n in range(5)]
    [(0, 0), (1, 0), (0, 1), (0, 2), (0, 3)]
    >>> blend.counts(10**15)
    [700000000000000, 300000000000000]
    """

    shares: list[int]
    bound: float

    def __init__(self, weights: Sequence[float | Fraction]) -> None:
        if not weights or not all(isinstance(w, Real) and math.isfinite(w) and w > 0 for w in weights):
            raise ConfigError(f"weights {list(weights)}: give one number above 0 for each source")
        exact = [weight if isinstance(weight, Fraction) else Fraction(repr(weight)) for weight in weights]
        common = math.lcm(*(weight.denominator for weight in exact))
        self.shares = [int(weight * common) for weight in exact]
        """Weights as whole numbers."""
        self.bound, self._root = _best_tree(self.shares)

    def locate(self, number: int) -> tuple[int, int]:
        """(source, how many samples of it come before) of a sample of the stream."""
        node = self._root
        while isinstance(node, _Node):
            before = node.left_of(number)
            is_left = node.left_of(number + 1) > before
            node, number = (node.left, before) if is_left else (node.right, number - before)
        return node, number

    def counts(self, number: int) -> list[int]:
        """The number of samples of each source among the first ones."""
        counts = [0] * len(self.shares)
        waiting: list[tuple[_Node | int, int]] = [(self._root, number)]
        while waiting:
            node, total = waiting.pop()
            if isinstance(node, _Node):
                left = node.left_of(total)
                waiting += [(node.left, left), (node.right, total - left)]
            else:
                counts[node] = total
        return counts


@dataclass(frozen=True, slots=True)
class _Node:
    """Two halves of the sources below, of which the left one has left / total of the weight."""

    left: _Node | int
    right: _Node | int
    share: int
    total: int

    def left_of(self, count: int) -> int:
        """The number of samples among count that are of the left half: count * share / total, rounded half up."""
        return (2 * count * self.share + self.total) // (2 * self.total)


def _best_tree(shares: list[int]) -> tuple[float, _Node | int]:
    """(the most that a count is off, the tree that has the least of it)."""
    if len(shares) == 1:
        return 0.0, 0
    low, high = 0.5, float(len(shares))
    tree = _tree(shares, high)
    assert tree is not None
    for _ in range(20):
        middle = (low + high) / 2
        better = _tree(shares, middle)
        if better is None:
            low = middle
        else:
            high, tree = middle, better
    return high, tree


def _tree(shares: list[int], bound: float) -> _Node | int | None:
    """A tree whose leaves are off by less than bound, if this finds one.

    A half of weight r of a node that is off by e is off by r e + 1/2. So a node may be off by the least of (what the
    half may be off by - 1/2) / r, a leaf by bound, and the root is off by 0.
    """
    order = sorted(range(len(shares)), key=lambda i: (shares[i], i))
    best = _over_sets(shares, bound) if len(shares) <= _EXHAUSTIVE else _over_ranges(shares, order, bound)
    room, tree = best
    return tree if room >= 0 else None


def _join(total: int, left: tuple[float, Any, int], right: tuple[float, Any, int]) -> tuple[float, Any, int]:
    room = min(_room(half[0], half[2] / total) for half in (left, right))
    return room, _Node(left[1], right[1], left[2], total), total


def _room(error: float, share: float) -> float:
    """What a node may be off by whose half of this share may be off by error; shares below any float count as 0."""
    return (error - 0.5) / share if share else math.copysign(math.inf, error - 0.5)


def _over_sets(shares: list[int], bound: float) -> tuple[float, Any]:
    best: dict[int, tuple[float, Any, int]] = {1 << i: (bound, i, share) for i, share in enumerate(shares)}
    for members in range(1, 1 << len(shares)):
        if members in best:
            continue
        total = sum(share for i, share in enumerate(shares) if members >> i & 1)
        first, half = members & -members, (members - 1) & members
        options = []
        while half:
            if half & first:
                options.append(_join(total, best[half], best[members ^ half]))
            half = (half - 1) & members
        best[members] = max(options, key=lambda option: option[0])
    room, tree, _ = best[(1 << len(shares)) - 1]
    return room, tree


def _over_ranges(shares: list[int], order: list[int], bound: float) -> tuple[float, Any]:
    best: dict[tuple[int, int], Any] = {(i, i + 1): (bound, s, shares[s]) for i, s in enumerate(order)}
    for width in range(2, len(order) + 1):
        for begin in range(len(order) - width + 1):
            end = begin + width
            total = best[begin, end - 1][2] + best[end - 1, end][2]
            options = (_join(total, best[begin, cut], best[cut, end]) for cut in range(begin + 1, end))
            best[begin, end] = max(options, key=lambda option: option[0])
    room, tree, _ = best[0, len(order)]
    return room, tree


def shuffled(place: int, length: int, key: int) -> int:
    """Where a random order of 0 to length - 1 has its place-th number; key, below 2**64, says which order.

    Computed for the one place: a Feistel network on the next even number of bits, walked until it falls within length.
    Source: doi:10.1007/3-540-45760-7_9, section 4.

    >>> sorted(shuffled(place, 10, key=1) for place in range(10)) == list(range(10))
    True
    """
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(_ROUNDS):
            mixed = xxhash.xxh3_64_intdigest(b"%d %d" % (turn, right), key)
            left, right = right, left ^ (mixed & mask)
        place = left << half | right
        if place < length:
            return place


class Mixture:
    """Samples of several data sets, as a Blend orders them: map-style, endless, of (seed, number) alone.

    Each pass through a data set is in an order of its own. len: samples until the data sets have been read once, on
    the whole; numbers go on after it. Raises ConfigError for a data set without samples.
    """

    datasets: list[Any]
    blend: Blend
    seed: int
    lengths: list[int]

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float | Fraction], seed: int) -> None:
        self.datasets, self.blend, self.seed = list(datasets), Blend(weights), seed
        if len(weights) != len(self.datasets):
            raise ConfigError(f"{len(weights)} weights for {len(self.datasets)} sources; give one for each")
        self.lengths = [len(dataset) for dataset in self.datasets]
        if min(self.lengths) < 1:
            raise ConfigError(f"source {self.lengths.index(0)} has no samples; leave it out")

    def __len__(self) -> int:
        return sum(self.lengths)

    def locate(self, number: int) -> tuple[int, int]:
        """(data set, number of the sample in it) of a sample."""
        source, before = self.blend.locate(number)
        turn, place = divmod(before, self.lengths[source])
        key = xxhash.xxh3_64_intdigest(b"%d %d %d" % (self.seed, source, turn))
        return source, shuffled(place, self.lengths[source], key)

    def __getitem__(self, number: int) -> Any:
        if number < 0:
            raise IndexError(f"sample {number} of a mixture, which counts from 0")
        source, index = self.locate(int(number))
        return self.datasets[source][index]


class StreamSampler(EpochSampler):
    """0, 1, 2, ..., going on from epoch to epoch; generator is the seed of the loader, which the order does not need.

    multiple: what the number of samples of an epoch is a multiple of, as of whole batches, so that none is dropped.

    >>> sampler = StreamSampler(range(3), generator=0)
    >>> list(sampler), list(sampler)
    ([0, 1, 2], [3, 4, 5])
    """

    def __init__(self, data_source: Any, generator: Any = None, multiple: int = 1) -> None:
        super().__init__(data_source, generator)
        self.multiple = multiple

    def __len__(self) -> int:
        return len(self.data_source) // self.multiple * self.multiple

    def __iter__(self) -> Any:
        begin = self.epoch * len(self)
        self.epoch += 1
        return iter(range(begin, begin + len(self)))
