"""Dims of arrays as products of factors, and which factors are the same one.

A reshape of 96 to [4, 3, 8] says that the dim of 96 is made of three factors, outermost first; an addition
says that two dims are one. Both are said here, in any order; what is left at the end are classes of factors that run
through the whole model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence


class Factor:
    """A dim, or a part of one that a reshape shows: of `size`, or once it was split the product of its parts."""

    size: int

    __slots__ = ("parent", "parts", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.parent: Factor | None = None
        self.parts: tuple[Factor, ...] = ()

    def __repr__(self) -> str:
        return "x".join(str(f.size) for f in leaves(self)) or "1"


Dims = tuple[Factor, ...]
"""One for each dim of an array."""


def fresh(shape: Iterable[int]) -> Dims:
    """Dims of which nothing is known."""
    return tuple(Factor(int(n)) for n in shape)


def root(factor: Factor) -> Factor:
    """The one that stands for all that are the same as this."""
    while factor.parent is not None:
        if factor.parent.parent is not None:
            factor.parent = factor.parent.parent
        factor = factor.parent
    return factor


def leaves(factor: Factor) -> list[Factor]:
    """The factors it is made of, outermost first, each its class's root; none for a size of 1."""
    result, stack = [], [factor]
    while stack:
        at = root(stack.pop())
        if at.parts:
            stack.extend(reversed(at.parts))
        elif at.size != 1:
            result.append(at)
    return result


def split(factor: Factor, inner: int) -> tuple[Factor, Factor]:
    """(outer, inner) parts of a factor that has none yet, inner of this size."""
    at = root(factor)
    at.parts = (Factor(at.size // inner), Factor(inner))
    return at.parts[0], at.parts[1]


def same(one: Factor, other: Factor) -> None:
    """Say that two dims are one. Two whose known parts cannot be aligned (6 x 4 and 4 x 6) stay apart."""
    a, b = root(one), root(other)
    if a is b or a.size != b.size or a.size <= 1:
        return
    if a.parts and b.parts:
        if not align([a], [b]):
            return
        a, b = root(a), root(b)
    if a is b:
        return
    if b.parts or not a.parts:
        a.parent = b
    else:
        b.parent = a


def all_same(one: Dims, other: Dims) -> None:
    """same(), dim by dim from the last; dims of another size, such as those that are broadcast, are left alone."""
    for a, b in zip(reversed(one), reversed(other), strict=False):
        same(a, b)


def align(one: Sequence[Factor], other: Sequence[Factor]) -> bool:
    """Say that two rows of factors are the same numbering of the same elements; False, and nothing said, if their sizes
    have no common refinement.
    """
    xs, ys = deque(f for x in one for f in leaves(x)), deque(f for y in other for f in leaves(y))
    if not _refinable([f.size for f in xs], [f.size for f in ys]):
        return False
    while xs and ys:
        x, y = leaves(xs.popleft()), leaves(ys.popleft())
        if len(x) != 1 or len(y) != 1:  # split meanwhile, by the alignment of a factor that occurs twice
            xs.extendleft(reversed(x))
            ys.extendleft(reversed(y))
            if not _refinable([f.size for f in xs], [f.size for f in ys]):
                return False
            continue
        a, b = x[0], y[0]
        if a.size > b.size:
            if a.size % b.size:
                return False
            a, rest = split(a, a.size // b.size)
            xs.appendleft(rest)
        elif b.size > a.size:
            if b.size % a.size:
                return False
            b, rest = split(b, b.size // a.size)
            ys.appendleft(rest)
        same(a, b)
    return True


def _refinable(one: list[int], other: list[int]) -> bool:
    """Whether at each step of walking both, one size divides the other."""
    xs, ys = deque(one), deque(other)
    while xs and ys:
        x, y = xs.popleft(), ys.popleft()
        if x % y and y % x:
            return False
        if x > y:
            xs.appendleft(x // y)
        elif y > x:
            ys.appendleft(y // x)
    return not xs and not ys


def reshaped(dims: Dims, shape: Sequence[int]) -> Dims:
    """Dims of an array with the same elements in the same order, in another shape.

    >>> [repr(dim) for dim in reshaped(fresh([2, 12]), [2, 3, 4])], [repr(dim) for dim in reshaped(fresh([2, 3]), [6])]
    (['2', '3', '4'], ['2x3'])
    """
    result = fresh(shape)
    if 0 in shape:
        return result
    left, right = deque(dims), deque(result)
    while left and right:
        ins, outs = [left.popleft()], [right.popleft()]
        low, high = ins[0].size, outs[0].size
        while low != high:
            if low < high:
                ins.append(left.popleft())
                low *= ins[-1].size
            else:
                outs.append(right.popleft())
                high *= outs[-1].size
        align(ins, outs)
    return result


def equal_part(whole: Factor, size: int) -> Factor:
    """A dim that is one of the equal parts, of `size`, that a whole is cut into in order; unknown if it is not."""
    made = Factor(size)
    if size > 1 and whole.size > size and whole.size % size == 0:
        align([Factor(whole.size // size), made], [whole])
    return made


def count(factors: Iterable[Factor]) -> int:
    """Product of sizes."""
    return math.prod(f.size for f in factors)
