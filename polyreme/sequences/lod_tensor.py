"""LoDTensor: rows on the host with their division into sequences, and into sequences of sequences.

Level of detail, "lod": for each level a list of offsets [n + 1], outermost first. A level's offsets count
the entries of the next one, the innermost's count rows. Source: PaddlePaddle 1.7, `fluid.LoDTensor` and lod_tensor.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core.devices.place import Place, as_place
from polyreme.errors import DTypeError, ShapeError


def lengths_to_offsets(lengths: Iterable[int]) -> list[int]:
    """Where sequences of these lengths begin, and where the last one ends.

    >>> lengths_to_offsets([2, 0, 3])
    [0, 2, 2, 5]
    """
    return [0, *accumulate(lengths)]


def offsets_to_lengths(offsets: Sequence[int]) -> list[int]:
    """The inverse of lengths_to_offsets.

    >>> offsets_to_lengths([0, 2, 2, 5])
    [2, 0, 3]
    """
    return [b - a for a, b in pairwise(offsets)]


def _levels(levels: Any, what: str) -> list[list[int]]:
    """Nested lists of integers, as Python's own."""
    try:
        return [[int(n) for n in np.asarray(level, dtype=object).reshape(-1)] for level in levels]
    except (TypeError, ValueError):
        raise ShapeError(f"{what}: got {levels!r}; needs one list of integers for each level") from None


def _fault(lod: Sequence[Sequence[int]], rows: int) -> str:
    """What keeps lod from dividing rows rows, or nothing."""
    for level, offsets in enumerate(lod):
        entries = len(lod[level + 1]) - 1 if level + 1 < len(lod) else rows
        kind = f"sequences of level {level + 1}" if level + 1 < len(lod) else "rows"
        if len(offsets) < 2 or offsets[0] != 0:
            return f"level {level} has offsets {list(offsets)}; they begin with 0 and hold one sequence or more"
        if any(a > b for a, b in pairwise(offsets)):
            return f"level {level} has offsets {list(offsets)}, which fall; no sequence has fewer than 0 entries"
        if offsets[-1] != entries:
            return f"level {level} divides {offsets[-1]} entries, there are {entries} {kind}"
    return ""


class LoDTensor:
    """An array on the host, and how its rows divide into sequences.

    >>> t = LoDTensor()
    >>> t.set(np.arange(5).reshape(5, 1), "cpu")
    >>> t.set_recursive_sequence_lengths([[2, 3]])
    >>> t.lod(), t.shape()
    ([[0, 2, 5]], [5, 1])
    """

    __hash__: ClassVar[Callable[[Any], int]] = object.__hash__

    def __init__(self) -> None:
        self._array: np.ndarray | None = None
        self._place: Place = as_place("cpu")
        self._lod: list[list[int]] = []

    # the value

    def set(self, array: Any, place: Any) -> None:
        """Hold a copy of array. The lod stays: has_valid_recursive_sequence_lengths says whether it still fits.

        place says where the array is to be used; until an Executor runs there, it is kept on the host. Raises
        DTypeError for what is no array of numbers, DeviceError for what is no place.
        """
        found = np.array(array)
        if found.dtype not in dtypes.NAMES.values():
            raise DTypeError(f"LoDTensor.set: an array of dtype {found.dtype}; needs one of {', '.join(dtypes.NAMES)}")
        self._place = as_place(place)
        self._array = found

    def _value(self, what: str) -> np.ndarray:
        if self._array is None:
            raise ShapeError(f"LoDTensor.{what}: it holds nothing yet; call set(array, place) first")
        return self._array

    def shape(self) -> list[int]:
        """Size of each dim; [0] before set()."""
        return [0] if self._array is None else list(self._array.shape)

    @property
    def dtype(self) -> np.dtype:
        """The array's dtype."""
        return self._value("dtype").dtype

    @property
    def place(self) -> Place:
        """Where the array is to be used."""
        return self._place

    def numpy(self) -> np.ndarray:
        """A copy of the rows."""
        return np.array(self._value("numpy()"))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = self._value("__array__()")
        return np.array(value) if dtype is None else value.astype(dtype)

    def __getitem__(self, index: Any) -> LoDTensor:
        """Part of the rows, without lod."""
        return _make(self._value("__getitem__()")[index], [], self._place)

    # its division

    def lod(self) -> list[list[int]]:
        """The offsets of each level, outermost first; [] for plain rows."""
        return [list(level) for level in self._lod]

    def set_lod(self, lod: Sequence[Sequence[int]]) -> None:
        """Divide the rows by offsets. Raises ShapeError for offsets that do not fit them."""
        self._divide(_levels(lod, "LoDTensor.set_lod"), "set_lod")

    def recursive_sequence_lengths(self) -> list[list[int]]:
        """The length of every sequence of each level, outermost first."""
        return [offsets_to_lengths(level) for level in self._lod]

    def set_recursive_sequence_lengths(self, recursive_sequence_lengths: Sequence[Sequence[int]]) -> None:
        """Divide the rows by lengths. Raises ShapeError for lengths that do not fit them."""
        lengths = _levels(recursive_sequence_lengths, "LoDTensor.set_recursive_sequence_lengths")
        self._divide([lengths_to_offsets(level) for level in lengths], "set_recursive_sequence_lengths")

    def _divide(self, lod: list[list[int]], what: str) -> None:
        fault = _fault(lod, len(np.atleast_1d(self._value(f"{what}()"))))
        if fault:
            raise ShapeError(f"LoDTensor.{what}: {fault} (shape {self.shape()}); give lengths that add up")
        self._lod = lod

    def has_valid_recursive_sequence_lengths(self) -> bool:
        """Whether the lod divides the rows that there are."""
        return self._array is not None and not _fault(self._lod, len(np.atleast_1d(self._array)))

    def __repr__(self) -> str:
        if self._array is None:
            return "LoDTensor(nothing set)"
        value = np.array2string(self._array, separator=", ").replace("\n", "\n" + " " * 10)
        return (
            f"LoDTensor(shape={self.shape()}, dtype={self._array.dtype.name}, place={self._place}, lod={self._lod},\n"
            f"          {value})"
        )


def _make(array: Any, lod: list[list[int]], place: Any) -> LoDTensor:
    tensor = LoDTensor()
    tensor.set(array, place)
    if lod:
        tensor.set_lod(lod)
    return tensor


def create_lod_tensor(data: Any, recursive_seq_lens: Sequence[Sequence[int]], place: Any) -> LoDTensor:
    """A LoDTensor of an ndarray, another LoDTensor, or a list of sequences, each a list of integer ids.

    A list becomes int64 [total, 1], and recursive_seq_lens must be the lengths of its sequences. Raises ShapeError for
    lengths that do not fit, TypeError for other data.

    >>> create_lod_tensor([[1, 2], [3]], [[2, 1]], "cpu").numpy().tolist()
    [[1], [2], [3]]
    """
    if isinstance(data, LoDTensor):
        data = np.asarray(data)
    if isinstance(data, list):
        lengths = [len(np.atleast_1d(s)) for s in data]
        if [lengths] != _levels(recursive_seq_lens, "create_lod_tensor"):
            raise ShapeError(
                f"create_lod_tensor: data is a list of sequences of lengths {lengths}, recursive_seq_lens is "
                f"{recursive_seq_lens}; give [{lengths}]"
            )
        flat = np.concatenate([np.asarray(s).reshape(len(np.atleast_1d(s)), -1) for s in data])
        if flat.dtype.kind not in "iu":
            raise TypeError(
                f"create_lod_tensor: a list of {flat.dtype}; a list holds integer ids, give anything else as an ndarray"
            )
        data = flat.astype(np.int64)
    if not isinstance(data, np.ndarray):
        raise TypeError(
            f"create_lod_tensor: data is {type(data).__name__}; give an ndarray, LoDTensor or list of lists"
        )
    tensor = _make(data, [], place)
    tensor.set_recursive_sequence_lengths(recursive_seq_lens)
    return tensor


def create_random_int_lodtensor(
    recursive_seq_lens: Sequence[Sequence[int]], base_shape: Sequence[int], place: Any, low: int, high: int
) -> LoDTensor:
    """Random int64 from low to high, both included: [sum of the last level's lengths, *base_shape].

    Drawn from numpy's global generator, which np.random.seed fixes. Raises ValueError if high < low.
    """
    if high < low:
        raise ValueError(f"create_random_int_lodtensor: low={low}, high={high}; high must not be less than low")
    lengths = _levels(recursive_seq_lens, "create_random_int_lodtensor")
    if not lengths:
        raise ShapeError("create_random_int_lodtensor: recursive_seq_lens=[]; give the lengths of one level or more")
    data = np.random.randint(low, high + 1, (sum(lengths[-1]), *base_shape), dtype=np.int64)
    return create_lod_tensor(data, lengths, place)


class LoDTensorArray:
    """A list that holds LoDTensors alone.

    >>> array = LoDTensorArray()
    >>> array.append(create_lod_tensor(np.ones((2, 1)), [[2]], "cpu"))
    >>> len(array), array[0].lod()
    (1, [[0, 2]])
    """

    def __init__(self, tensors: Iterable[LoDTensor] = ()) -> None:
        self._tensors: list[LoDTensor] = []
        for tensor in tensors:
            self.append(tensor)

    def append(self, tensor: LoDTensor) -> None:
        """Add a tensor at the end. Raises TypeError for what is no LoDTensor."""
        self._tensors.append(_check(tensor))

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: int) -> LoDTensor:
        if not -len(self) <= index < len(self):
            raise IndexError(f"LoDTensorArray: index {index} of {len(self)} tensors")
        return self._tensors[index]

    def __setitem__(self, index: int, tensor: LoDTensor) -> None:
        if not -len(self) <= index < len(self):
            raise IndexError(f"LoDTensorArray: index {index} of {len(self)} tensors; append adds one")
        self._tensors[index] = _check(tensor)

    def __iter__(self) -> Iterator[LoDTensor]:
        return iter(self._tensors)

    def __repr__(self) -> str:
        return f"LoDTensorArray({self._tensors!r})"


def _check(tensor: Any) -> LoDTensor:
    if not isinstance(tensor, LoDTensor):
        raise TypeError(f"LoDTensorArray: got {type(tensor).__name__}; it holds LoDTensors, see create_lod_tensor")
    return tensor
