"""Collation: a list of samples becomes one batch of stacked NumPy arrays.

Two steps, so that a worker can stack straight into shared memory: `plan` says which arrays go into which leaf,
`Stack.write` copies them.
"""

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from polyreme.errors import DTypeError, ShapeError
from polyreme.io.structure import map_leaves, rebuild


class Stack:
    """Arrays of one shape that will be stacked along a new first dim."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = arrays
        self.shape = (len(arrays), *arrays[0].shape)
        self.dtype: np.dtype[Any] = np.result_type(*{array.dtype for array in arrays})
        self.nbytes: int = self.dtype.itemsize * int(np.prod(self.shape))

    def write(self, out: np.ndarray) -> None:
        """Copy the arrays into out, an array of self.shape and self.dtype."""
        np.stack(self.arrays, out=out)


def default_collate_fn(batch: Sequence[Any]) -> Any:
    """Stack samples field by field: arrays, Tensors and numbers along a new first dim; strings stay a list.

    Dicts keep their keys, lists and tuples become lists, namedtuples stay namedtuples. The DataLoader makes Tensors of
    the arrays afterwards. Raises ShapeError or DTypeError naming the sample that does not fit.

    >>> default_collate_fn([{"x": np.zeros(2), "n": 1}, {"x": np.ones(2), "n": 2}])
    {'x': array([[0., 0.],
           [1., 1.]]), 'n': array([1, 2])}
    """
    return materialize(plan(batch, range(len(batch))))


def default_convert_fn(batch: Any) -> Any:
    """One sample as it is, with Tensors as arrays; what the DataLoader uses when batch_size is None."""
    return map_leaves(lambda leaf: as_array(leaf) if hasattr(leaf, "numpy") else leaf, batch)


def materialize(planned: Any) -> Any:
    """A planned batch with every Stack made into an array of its own."""

    def stacked(leaf: Any) -> Any:
        if not isinstance(leaf, Stack):
            return leaf
        out = np.empty(leaf.shape, leaf.dtype)
        leaf.write(out)
        return out

    return map_leaves(stacked, planned)


def plan(batch: Sequence[Any], ids: Sequence[Any], where: str = "") -> Any:
    """The batch's nesting with Stack leaves; ids name the samples and where names the field in errors."""
    first = batch[0]
    if isinstance(first, Mapping):
        keys = _common(batch, ids, where, Mapping, lambda sample: list(sample), "keys")
        return {key: plan([sample[key] for sample in batch], ids, f"{where}[{key!r}]") for key in keys}
    if isinstance(first, (str, bytes)):
        _common(batch, ids, where, (str, bytes), type, "types")
        return list(batch)
    if isinstance(first, (list, tuple)):
        _common(batch, ids, where, (list, tuple), len, "lengths")
        fields = [plan(field, ids, f"{where}[{i}]") for i, field in enumerate(zip(*batch, strict=True))]
        return rebuild(first, fields) if hasattr(first, "_fields") else fields
    arrays = [_leaf(sample, name, where) for sample, name in zip(batch, ids, strict=True)]
    _common(arrays, ids, where, np.ndarray, np.shape, "shapes")
    _common(arrays, ids, where, np.ndarray, lambda array: _KINDS.get(array.dtype.kind, array.dtype), "kinds of dtype")
    return Stack(arrays)


# what numpy may promote within; a bool among floats or a date among numbers is a mistake in the dataset
_KINDS = {"i": "number", "u": "number", "f": "number", "c": "number", "V": "number", "b": "bool"}


def as_array(value: Any) -> np.ndarray:
    """value as an ndarray; a Tensor is asked for its own."""
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)


def _leaf(sample: Any, name: Any, where: str) -> np.ndarray:
    if isinstance(sample, (np.ndarray, np.generic, numbers.Number)) or hasattr(sample, "numpy"):
        array = as_array(sample)
        if array.dtype.kind != "O":
            return array
    raise DTypeError(
        f"cannot collate sample{where} of sample {name}: it is a {type(sample).__name__}; return arrays, Tensors, "
        "numbers, strings, or dicts, lists and tuples of them, or give the DataLoader a collate_fn"
    )


def _common(
    batch: Sequence[Any], ids: Sequence[Any], where: str, kind: Any, trait: Callable[[Any], Any], noun: str
) -> Any:
    first = trait(batch[0])
    for sample, name in zip(batch, ids, strict=True):
        if not isinstance(sample, kind):
            raise DTypeError(
                f"cannot collate sample{where}: sample {ids[0]} has a {type(batch[0]).__name__} there, sample {name} a "
                f"{type(sample).__name__}; make the dataset return one type"
            )
        if not _equal_structures(trait(sample), first):
            raise ShapeError(
                f"cannot collate sample{where}: {noun} differ, {first} in sample {ids[0]} but {trait(sample)} in "
                f"sample {name}; pad or crop in the dataset, or give the DataLoader a collate_fn"
            )
    return first


def _equal_structures(a: Any, b: Any) -> bool:
    return set(a) == set(b) if isinstance(a, list) else bool(a == b)
