"""Datasets, samplers and the DataLoader. Names load when first used, so that worker processes never import jax."""

import importlib
from typing import Any

from polyreme.errors import nearest

_HOME = {
    "Dataset": "dataset",
    "IterableDataset": "dataset",
    "TensorDataset": "dataset",
    "ComposeDataset": "dataset",
    "ChainDataset": "dataset",
    "ConcatDataset": "dataset",
    "Subset": "dataset",
    "random_split": "dataset",
    "Sampler": "sampler",
    "SequenceSampler": "sampler",
    "RandomSampler": "sampler",
    "SubsetRandomSampler": "sampler",
    "WeightedRandomSampler": "sampler",
    "BatchSampler": "batch_sampler",
    "DistributedBatchSampler": "batch_sampler",
    "get_worker_info": "worker_info",
    "default_collate_fn": "collate",
    "default_convert_fn": "collate",
    "DataLoader": "dataloader",
}

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]  (names load late)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'polyreme.io' has no attribute {name!r}{nearest(name, __all__)}")
    return getattr(importlib.import_module(f"polyreme.io.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
