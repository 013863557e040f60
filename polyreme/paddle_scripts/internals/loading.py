"""Attributes of PaddlePaddle's loaders and samplers that trainers and subclasses read."""

from __future__ import annotations

from typing import Any

from polyreme.io import IterableDataset


class DatasetKind:
    """How a DataLoader reads its dataset: by index, or in its own order."""

    MAP, ITER = range(2)


class DataLoaderNames:
    """Attributes of DataLoader."""

    pin_memory = True  # PaddlePaddle's default; XLA stages copies itself

    @property
    def dataset_kind(self: Any) -> int:
        """MAP or ITER of DatasetKind."""
        return DatasetKind.ITER if isinstance(self.dataset, IterableDataset) else DatasetKind.MAP

    @property
    def auto_collate_batch(self: Any) -> bool:
        """Whether samples are collated to batches."""
        return self.batch_size is not None or self.batch_sampler is not None

    @property
    def _persistent_workers(self: Any) -> bool:
        return self.persistent_workers


class BatchSamplerNames:
    """Attributes of BatchSampler."""

    _acc_steps = 1  # batches of a step that a worker puts in one
