"""Samplers: the order in which sample indices are read, a pure function of (seed, epoch)."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polyreme.errors import ConfigError, DTypeError
from polyreme.io.collate import as_array
from polyreme.io.seed import epoch_rng, seed_of


class Sampler:
    """An order of sample indices: a subclass defines `__iter__()`; `data_source` gives the length."""

    def __init__(self, data_source: Any = None) -> None:
        self.data_source = data_source

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError(f"{type(self).__name__} does not define __iter__; it must return indices")

    def __len__(self) -> int:
        if self.data_source is None:
            raise DTypeError(f"{type(self).__name__} has no length: it was made without a data_source")
        return len(self.data_source)


class SequenceSampler(Sampler):
    """0, 1, 2, ... to the end of the data source."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


class EpochSampler(Sampler):
    """A random order that differs from epoch to epoch and depends on (seed, epoch) alone.

    Each `iter()` takes the current epoch and moves on to the next; `set_epoch(n)` chooses it.
    """

    epoch: int

    def __init__(self, data_source: Any = None, generator: Any = None) -> None:
        super().__init__(data_source)
        self.seed: int = seed_of(generator, type(self).__name__)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of epoch `epoch`."""
        self.epoch = int(epoch)

    def __iter__(self) -> Iterator[int]:
        rng = epoch_rng(self.seed, self.epoch)
        self.epoch += 1
        return iter(self._draw(rng).tolist())

    def _draw(self, rng: np.random.Generator) -> np.ndarray:
        raise NotImplementedError(f"{type(self).__name__} does not define _draw; it must return an epoch's indices")


class RandomSampler(EpochSampler):
    """A random permutation of the data source, or num_samples of it, or draws with replacement.

    generator: an int seed, a numpy Generator, or an object with initial_seed(); None takes a seed from numpy's global
    generator. As in Paddle it may also be an iterator over indices, which is then read as it comes.

    >>> sampler = RandomSampler(range(4), generator=3)
    >>> first, second = list(sampler), list(sampler)
    >>> sorted(first) == sorted(second) == [0, 1, 2, 3]
    True
    >>> sampler.set_epoch(0)
    >>> list(sampler) == first
    True
    """

    def __init__(
        self, data_source: Any, replacement: bool = False, num_samples: int | None = None, generator: Any = None
    ) -> None:
        self._indices = generator if isinstance(generator, Iterator) else None
        super().__init__(data_source, None if self._indices is not None else generator)
        if not isinstance(replacement, bool):
            raise DTypeError(f"RandomSampler: replacement must be True or False, got {replacement!r}")
        if num_samples is not None:
            _check_count("RandomSampler", num_samples)
        if num_samples is not None and not replacement and num_samples > len(data_source):
            raise ConfigError(
                f"RandomSampler: num_samples={num_samples} of {len(data_source)} samples without replacement; "
                "ask for fewer or set replacement=True"
            )
        self.replacement = replacement
        self._num_samples = num_samples

    @property
    def num_samples(self) -> int:
        """Indices per epoch."""
        return len(self.data_source) if self._num_samples is None else self._num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        if self._indices is not None:
            self.epoch += 1
            return (int(index) for index, _ in zip(self._indices, range(self.num_samples), strict=False))
        return super().__iter__()

    def _draw(self, rng: np.random.Generator) -> np.ndarray:
        if self.replacement:
            return rng.integers(0, len(self.data_source), size=self.num_samples)
        return rng.permutation(len(self.data_source))[: self.num_samples]


class SubsetRandomSampler(EpochSampler):
    """A random permutation of the given indices."""

    def __init__(self, indices: Sequence[int]) -> None:
        super().__init__()
        if len(indices) == 0:
            raise ConfigError("SubsetRandomSampler got no indices; give at least one")
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def _draw(self, rng: np.random.Generator) -> np.ndarray:
        return rng.permutation(np.asarray(self.indices))


class WeightedRandomSampler(EpochSampler):
    """num_samples indices of 0..len(weights), drawn with probability proportional to their weight."""

    def __init__(self, weights: Any, num_samples: int, replacement: bool = True) -> None:
        super().__init__()
        self.weights: np.ndarray = as_array(weights).astype(np.float64)
        _check_count("WeightedRandomSampler", num_samples)
        if self.weights.ndim != 1 or not np.isfinite(self.weights).all() or (self.weights < 0).any():
            raise ConfigError("WeightedRandomSampler: weights must be one dim of finite numbers of at least 0")
        positive = int(np.count_nonzero(self.weights))
        if positive < (1 if replacement else num_samples):
            raise ConfigError(
                f"WeightedRandomSampler: {positive} of {self.weights.size} weights are positive, which is too few for "
                f"num_samples={num_samples} with replacement={replacement}"
            )
        self.num_samples = num_samples
        self.replacement = replacement

    def __len__(self) -> int:
        return self.num_samples

    def _draw(self, rng: np.random.Generator) -> np.ndarray:
        p = self.weights / self.weights.sum()
        return rng.choice(self.weights.size, self.num_samples, self.replacement, p)


def _check_count(asked_by: str, count: Any) -> None:
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
        raise ConfigError(f"{asked_by}: num_samples must be a whole number of at least 1, got {count!r}")
