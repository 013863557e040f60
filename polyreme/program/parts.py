"""Feeds in parts: a batch cut for several devices, along dim 0 or between sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polyreme.eager.tensor import Tensor
from polyreme.errors import ProgramError
from polyreme.program.feed import arrays_of, fed, shapes_in, without_unused
from polyreme.program.program import Program

# end the names of feeds whose sizes say how long the longest sequence is, or may be: the same for all
_LONGEST = ("@MAX", "@ROOM")
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Feeds:
    """name -> array with the devices' parts along dim 0, each padded to the largest.

    shapes: of each device's part without padding; of one part if all are alike. is_checked: names, dtypes and shapes
    fit the Program; else check does that. parts: what each device is given, as it was fed; () if it was cut evenly.
    """

    arrays: Mapping[str, Any]
    shapes: tuple[Shapes, ...]
    count: int
    is_checked: bool
    parts: tuple[dict[str, Any], ...] = ()

    @property
    def is_even(self) -> bool:
        """Whether all devices get as much."""
        return len(self.shapes) == 1

    @property
    def key(self) -> tuple[Any, ...]:
        """What a program is compiled for."""
        return (shapes_in(self.arrays), self.shapes)

    def padded(self, pad: Callable[[dict[str, Any]], dict[str, Any]]) -> Feeds:
        """These with each device's part padded to one size."""
        return replace(_together([pad(part) for part in self.parts], self.count), parts=self.parts)

    def check(self, program: Program) -> None:
        """Raise ProgramError unless a part fits the Program."""
        if not self.is_checked:
            fed(program, {n: a[: len(a) // self.count] for n, a in self.arrays.items()})


def parts_of(program: Program, feed: Any, count: int) -> Feeds:
    """The feed for so many devices: a dict that is cut evenly, the last device also getting the rest, or a list of a
    dict for each. Raises ProgramError for fewer samples than devices and for a list of another length.
    """
    if isinstance(feed, Mapping):
        feed = without_unused(program, feed)
        whole = arrays_of(feed)
        if whole is not None and all(_is_even(n, a, count) for n, a in whole.items()):
            return Feeds(whole, (tuple((n, (len(a) // count, *a.shape[1:])) for n, a in whole.items()),), count, False)
        pieces = {name: _cut(name, value, count) for name, value in feed.items()}
        parts = [{name: piece[i] for name, piece in pieces.items()} for i in range(count)]
    elif isinstance(feed, (list, tuple)) and all(isinstance(part, Mapping) for part in feed):
        parts = [without_unused(program, part) for part in feed]
    else:
        raise ProgramError(f"feed is a dict, or a list with a dict for each device, got {type(feed).__name__}")
    if len(parts) != count:
        raise ProgramError(f"feed is a list of {len(parts)} dicts for {count} devices; give one for each device")
    return _together([fed(program, part) for part in parts], count)


def _is_even(name: str, array: Any, count: int) -> bool:
    return array.ndim > 0 and len(array) > 0 and len(array) % count == 0 and not name.endswith(_LONGEST)


def _cut(name: str, value: Any, count: int) -> Sequence[Any]:
    if name.endswith(_LONGEST):
        return [value] * count
    lod = value.lod() if hasattr(value, "lod") else []
    if not lod:
        # a list stays one: its numbers take the dtype of the Variable
        value = np.asarray(value) if hasattr(value, "lod") else value
        rows = value._array if isinstance(value, Tensor) else value if hasattr(value, "shape") else list(value)
        if np.ndim(rows) == 0:
            raise ProgramError(
                f"feed: {name!r} is a number, which cannot be cut for {count} devices; feed one for each"
            )
        return [rows[a:b] for a, b in _bounds(name, len(rows), count, "samples")]
    pieces = []
    for a, b in _bounds(name, len(lod[0]) - 1, count, "sequences"):
        lengths = []
        for level in lod:
            lengths.append([int(y - x) for x, y in zip(level[a:b], level[a + 1 : b + 1], strict=True)])
            a, b = level[a], level[b]
        piece = type(value)()
        piece.set(np.asarray(value)[a:b], "cpu")
        piece.set_recursive_sequence_lengths(lengths)
        pieces.append(piece)
    return pieces


def _bounds(name: str, size: int, count: int, what: str) -> list[tuple[int, int]]:
    if size < count:
        raise ProgramError(f"feed: {name!r} has {size} {what} for {count} devices; give one for each at least")
    step = size // count
    return [(i * step, size if i == count - 1 else (i + 1) * step) for i in range(count)]


def _together(parts: list[dict[str, Any]], count: int) -> Feeds:
    for i, part in enumerate(parts):
        if part.keys() != parts[0].keys():
            raise ProgramError(f"feed: device 0 is given {sorted(parts[0])}, device {i} {sorted(part)}")
    shapes = [tuple((n, tuple(part[n].shape)) for n in parts[0]) for part in parts]
    arrays = {n: np.concatenate([_pad(p[n], [q[n].shape for q in parts]) for p in parts]) for n in parts[0]}
    return Feeds(arrays, tuple(shapes) if len(set(shapes)) > 1 else (shapes[0],), count, True, tuple(parts))


def _pad(array: Any, shapes: Sequence[tuple[int, ...]]) -> np.ndarray:
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    return np.pad(np.asarray(array), [(0, most - size) for size, most in zip(array.shape, largest, strict=True)])


def pieces(out: Any, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """What each device gave, of what lies padded one after the other: shapes of each one's without the padding."""
    result = np.split(np.asarray(out), len(shapes))
    return [p[tuple(slice(0, s) for s in shape)] for p, shape in zip(result, shapes, strict=True)]


def joined_offsets(levels: Sequence[np.ndarray]) -> np.ndarray:
    """Offsets of sequences one after the other, of the offsets of each part.

    >>> joined_offsets([np.array([0, 2]), np.array([0, 1, 4])]).tolist()
    [0, 2, 3, 6]
    """
    found = levels[0]
    for level in levels[1:]:
        found = np.concatenate([found, found[-1] + level[1:]])
    return found
