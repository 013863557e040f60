"""The order in which a run reads its training samples, and the batches it makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polyreme.io import BatchSampler, DataLoader
from polyreme.recipes.config import RunConfig
from polyreme.recipes.data.batches import Batch, Numbered


def training_loader(config: RunConfig, corpus: Any) -> DataLoader:
    """A loader of global batches of the data's training samples."""
    data = Numbered(corpus.train)
    sampler = corpus.sampler(data, generator=config.data.seed)
    batches = BatchSampler(sampler=sampler, batch_size=config.train.global_batch, drop_last=True)
    workers = config.data.num_workers
    return DataLoader(
        data,
        batch_sampler=batches,
        num_workers=workers,
        persistent_workers=workers > 0,
        timeout=config.data.worker_timeout,
    )


def training_batches(loader: DataLoader) -> Iterator[Batch]:
    """Batches without an end: pass after pass."""
    while True:
        for columns in loader:
            yield Batch.of(columns)
