"""Batch samplers: sample indices in batches, for one process and for several."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from polyreme import flags
from polyreme.errors import ConfigError, DTypeError
from polyreme.io.dataset import IterableDataset
from polyreme.io.sampler import RandomSampler, Sampler, SequenceSampler
from polyreme.keyword_names import NamesKeywords


class BatchSampler(NamesKeywords, Sampler):
    """The indices of a sampler, or of a dataset in order or shuffled, in lists of batch_size.

    >>> list(BatchSampler(dataset=range(5), batch_size=2))
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        dataset: Any = None,
        sampler: Any = None,
        shuffle: bool = False,
        batch_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset)
        if (dataset is None) == (sampler is None):
            raise ConfigError("BatchSampler takes either dataset or sampler, got " + _which(dataset))
        if sampler is not None and shuffle:
            raise ConfigError("BatchSampler: shuffle=True has no effect on a given sampler; give a RandomSampler")
        if isinstance(dataset, IterableDataset):
            raise DTypeError("BatchSampler: an IterableDataset has no indices to sample; give batch_size to DataLoader")
        if sampler is not None and not isinstance(sampler, Iterable):
            raise DTypeError(f"BatchSampler: sampler must give indices, got a {type(sampler).__name__}")
        self.sampler: Any = sampler
        if dataset is not None:
            self.sampler = RandomSampler(dataset) if shuffle else SequenceSampler(dataset)
        self.shuffle = shuffle
        self.batch_size: int = check_batch_size("BatchSampler", batch_size)
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        return in_batches(iter(self.sampler), self.batch_size, self.drop_last)

    def __len__(self) -> int:
        return batch_count(len(self.sampler), self.batch_size, self.drop_last)


class DistributedBatchSampler(BatchSampler):
    """This process's share of the batches of a dataset that num_replicas processes read together.

    Blocks of batch_size consecutive samples go to the ranks in turn; the order is padded with its own first samples to
    a multiple of num_replicas, so that all ranks take the same number of steps. With shuffle the order is a pure
    function of the epoch, equal on all ranks; each iteration moves on to the next epoch and set_epoch(n) chooses it.
    num_replicas and rank come from PADDLE_TRAINERS_NUM and PADDLE_TRAINER_ID when not given.

    >>> list(DistributedBatchSampler(range(7), 2, num_replicas=3, rank=1))
    [[2, 3], [0]]
    """

    epoch: int

    seed = 0  # all ranks must agree without speaking to each other

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset=dataset, batch_size=batch_size, drop_last=drop_last)
        self.dataset = dataset
        self.shuffle = shuffle
        self.nranks: int = flags.trainers_num() if num_replicas is None else int(num_replicas)
        self.local_rank: int = flags.trainer_id() if rank is None else int(rank)
        if self.nranks < 1 or not 0 <= self.local_rank < self.nranks:
            raise ConfigError(
                f"DistributedBatchSampler: rank {self.local_rank} of {self.nranks} replicas does not exist; "
                "ranks count from 0"
            )
        self.epoch = 0
        self.num_samples: int = math.ceil(len(dataset) / self.nranks)
        self.total_size: int = self.num_samples * self.nranks

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of epoch `epoch`."""
        self.epoch = int(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        order = np.arange(len(self.dataset))
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(order)
        self.epoch += 1
        return in_batches(iter(self._mine(order)), self.batch_size, self.drop_last)

    def __len__(self) -> int:
        return batch_count(self.num_samples, self.batch_size, self.drop_last)

    def _mine(self, order: np.ndarray) -> list[int]:
        order = np.resize(order, self.total_size)
        whole = self.total_size - self.total_size % (self.batch_size * self.nranks)
        blocks = order[:whole].reshape(-1, self.nranks, self.batch_size)[:, self.local_rank].reshape(-1)
        rest = order[whole:].reshape(self.nranks, -1)[self.local_rank]
        return [*blocks.tolist(), *rest.tolist()]


def in_batches(items: Iterator[Any], batch_size: int, drop_last: bool) -> Iterator[list[Any]]:
    """Lists of batch_size items; the last one may be shorter unless drop_last."""
    batch = []
    for item in items:
        batch.append(item)
        if len(batch) == batch_size:
            yield batch
            batch = []
    if batch and not drop_last:
        yield batch


def batch_count(num_samples: int, batch_size: int, drop_last: bool) -> int:
    """Batches that in_batches gives."""
    return num_samples // batch_size if drop_last else math.ceil(num_samples / batch_size)


def check_batch_size(asked_by: str, batch_size: Any) -> int:
    """batch_size, if it is a whole number of at least 1."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
        raise ConfigError(f"{asked_by}: batch_size must be a whole number of at least 1, got {batch_size!r}")
    return int(batch_size)


def _which(dataset: Any) -> str:
    return "neither" if dataset is None else "both"
