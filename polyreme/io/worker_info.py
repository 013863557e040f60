"""What a dataset may ask about the worker process it is running in."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WorkerInfo:
    """One worker: its number among num_workers, its copy of the dataset, and the seed of its random numbers."""

    id: int
    num_workers: int
    dataset: Any
    seed: int


class _Here:
    info: WorkerInfo | None = None
    is_worker = False


def get_worker_info() -> WorkerInfo | None:
    """In a DataLoader worker: which one this is; elsewhere None.

    An IterableDataset uses it to give each worker its own part of the stream:
    `islice(stream, info.id, None, info.num_workers)`.
    """
    return _Here.info


def is_worker() -> bool:
    """Whether this process is a DataLoader's, from its start."""
    return _Here.is_worker


def become_worker() -> None:
    """Declare that this process is a DataLoader's."""
    _Here.is_worker = True


def set_worker_info(info: WorkerInfo | None) -> None:
    """Declare which worker this process is."""
    _Here.info = info
