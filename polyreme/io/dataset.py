"""Datasets: samples by index, samples as a stream, and datasets made of others."""

import bisect
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.io.collate import as_array
from polyreme.io.seed import seed_of


class Dataset:
    """Samples by index: a subclass defines `__getitem__(index)` and `__len__()`."""

    def __getitem__(self, idx: int) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not define __getitem__; it must return sample {idx!r}")

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} does not define __len__; it must return a number of samples")


class IterableDataset(Dataset):
    """Samples as a stream: a subclass defines `__iter__()`; under workers it shares the stream by get_worker_info()."""

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError(f"{type(self).__name__} does not define __iter__; it must return an iterator")

    def __getitem__(self, idx: int) -> Any:
        raise TypeError(f"{type(self).__name__} is an IterableDataset and has no sample {idx!r}; iterate over it")

    def __len__(self) -> int:
        # TypeError, because list(stream) takes it as "no length known" and goes on
        raise TypeError(f"{type(self).__name__} is an IterableDataset and has no length; iterate over it")


class TensorDataset(Dataset):
    """Row i of each of several Tensors or arrays, as a tuple; they come in a list, or one by one.

    Raises ShapeError unless all first dims are equal. Worker processes see the rows as ndarrays.

    >>> TensorDataset([np.arange(6).reshape(3, 2), np.array([7, 8, 9])])[1]
    (array([2, 3]), np.int64(8))
    """

    def __init__(self, tensors: Sequence[Any], *more: Any) -> None:
        self.tensors = tensors = [tensors, *more] if more or hasattr(tensors, "shape") else tensors
        shapes = [list(tensor.shape) for tensor in tensors]
        if not shapes or not all(shapes) or len({shape[0] for shape in shapes}) > 1:
            raise ShapeError(f"TensorDataset needs tensors with one common first dim, got shapes {shapes}")

    def __getitem__(self, idx: int) -> tuple[Any, ...]:
        return tuple(tensor[idx] for tensor in self.tensors)

    def __len__(self) -> int:
        return self.tensors[0].shape[0]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"tensors": [as_array(tensor) for tensor in self.tensors]}

    def rows(self) -> Callable[[int], tuple[Any, ...]]:
        """A function from index to the row as ndarrays, without a Tensor per sample."""
        arrays = [as_array(tensor) for tensor in self.tensors]
        return lambda idx: tuple(array[idx] for array in arrays)


class ComposeDataset(Dataset):
    """Sample i of each of several datasets of one length, joined into one flat tuple."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self.datasets: list[Any] = _several("ComposeDataset", datasets)
        lengths = [len(dataset) for dataset in self.datasets]
        if len(set(lengths)) > 1:
            raise ShapeError(f"ComposeDataset needs datasets of one length, got lengths {lengths}")

    def __getitem__(self, idx: int) -> tuple[Any, ...]:
        samples = [dataset[idx] for dataset in self.datasets]
        return tuple(itertools.chain.from_iterable(s if isinstance(s, (list, tuple)) else [s] for s in samples))

    def __len__(self) -> int:
        return len(self.datasets[0])


class ChainDataset(IterableDataset):
    """Several streams, one after the other."""

    def __init__(self, datasets: Sequence[IterableDataset]) -> None:
        self.datasets: list[Any] = _several("ChainDataset", datasets, streams=True)

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self.datasets)


class ConcatDataset(Dataset):
    """Several datasets, one after the other; negative indices count from the end.

    >>> ConcatDataset([Subset("abc", [0, 1, 2]), Subset("de", [0, 1])])[3]
    'd'
    """

    def __init__(self, datasets: Iterable[Dataset]) -> None:
        self.datasets: list[Any] = _several("ConcatDataset", datasets)
        self.cumulative_sizes: list[int] = list(itertools.accumulate(len(dataset) for dataset in self.datasets))

    def __getitem__(self, idx: int) -> Any:
        at = idx + len(self) if idx < 0 else idx
        if not 0 <= at < len(self):
            raise IndexError(f"ConcatDataset of {len(self)} samples has no sample {idx}")
        part = bisect.bisect_right(self.cumulative_sizes, at)
        return self.datasets[part][at - (self.cumulative_sizes[part - 1] if part else 0)]

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]


class Subset(Dataset):
    """The samples of a dataset at the given indices, in that order."""

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        self.dataset = dataset
        self.indices = indices

    def __getitem__(self, idx: int) -> Any:
        return self.dataset[self.indices[idx]]

    def __len__(self) -> int:
        return len(self.indices)


def random_split(dataset: Any, lengths: Sequence[float], generator: Any = None) -> list[Subset]:
    """Disjoint random Subsets that cover the dataset; lengths are counts, or fractions that sum to 1.

    Fractions are rounded down and what is left goes one each to the first Subsets. generator: see RandomSampler.
    """
    counts = _counts(len(dataset), lengths)
    order = np.random.default_rng(seed_of(generator, "random_split")).permutation(len(dataset)).tolist()
    ends = list(itertools.accumulate(counts))
    return [Subset(dataset, order[end - count : end]) for end, count in zip(ends, counts, strict=True)]


def reader(dataset: Any) -> Callable[[Any], Any]:
    """What the loader calls to read one sample: dataset[index], but rows of a TensorDataset stay ndarrays."""
    if type(dataset) is TensorDataset:
        return dataset.rows()
    if type(dataset) is Subset:
        inner, indices = reader(dataset.dataset), dataset.indices
        return lambda idx: inner(indices[idx])
    return dataset.__getitem__


def _counts(total: int, lengths: Sequence[float]) -> list[int]:
    if any(isinstance(n, float) for n in lengths):
        if not math.isclose(sum(lengths), 1.0) or any(not 0 <= n <= 1 for n in lengths):
            raise ConfigError(f"random_split: fractions {list(lengths)} must lie in 0..1 and sum to 1")
        counts = [math.floor(total * n) for n in lengths]
        for i in range(total - sum(counts)):
            counts[i % len(counts)] += 1
        if 0 in counts:
            warnings.warn(f"random_split: part {counts.index(0)} of {counts} is empty", stacklevel=3)
        return counts
    if sum(lengths) != total or any(n < 0 for n in lengths):
        raise ConfigError(
            f"random_split: lengths {list(lengths)} sum to {sum(lengths)}, the dataset has {total} samples"
        )
    return [int(n) for n in lengths]


def _several(asked_by: str, datasets: Iterable[Any], streams: bool = False) -> list[Any]:
    several = list(datasets)
    if not several:
        raise ConfigError(f"{asked_by} got no datasets; give at least one")
    for dataset in several:
        if isinstance(dataset, IterableDataset) is not streams:
            needs = "IterableDatasets" if streams else "datasets with an index and a length"
            raise DTypeError(f"{asked_by} takes {needs}, got a {type(dataset).__name__}")
    return several
