"""Batches whose samples can be named: ids travel with the rows, and token ids are checked before a step sees them."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from polyreme.data.packing import NO_LABEL
from polyreme.errors import DataError
from polyreme.recipes.config import ModelConfig
from polyreme.recipes.samples import labels_of

_SHOWN = 16  # sample ids in a message before it says how many more


class Batch(NamedTuple):
    """Rows of a data set: ids int `[batch]`, what a model takes and its labels, of tokens int `[batch, seq]` each."""

    ids: np.ndarray
    inputs: np.ndarray
    labels: Any

    @classmethod
    def of(cls, columns: Sequence[Any]) -> Self:
        """A batch of (ids, inputs, *labels)."""
        ids, inputs, *labels = map(np.asarray, columns)
        return cls(ids, inputs, labels_of(labels))


class Numbered:
    """A data set whose samples are several arrays, which gives (index, *arrays)."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return index, *self.dataset[index]


def gather(dataset: Numbered, indices: Sequence[int]) -> Batch:
    """The samples of these indices as one batch."""
    return Batch.of([np.stack(column) for column in zip(*(dataset[i] for i in indices), strict=True)])


def check_tokens(batch: Batch, model: ModelConfig, what: str) -> None:
    """Raises DataError naming sample and position for a token or label outside 0..model.vocab_size - 1; labels may be
    NO_LABEL.

    A device would not complain: XLA clamps an index that is out of range. what says which batch, as "step 7".
    """
    vocab_size = model.vocab_size
    tokens = batch.inputs[:, 0] if batch.inputs.ndim == 3 else batch.inputs  # the others say where documents lie
    labels = np.where(batch.labels == NO_LABEL, 0, batch.labels)
    for name, values in (("token", tokens), ("label", labels)):
        if values.size and not (values.min() >= 0 and values.max() < vocab_size):
            row, at = np.argwhere((values < 0) | (values >= vocab_size))[0]
            raise DataError(
                f"{what}: sample {batch.ids[row]} has {name} {values[row, at]} at position {at}, but model.vocab_size="
                f"{vocab_size} allows 0 to {vocab_size - 1}; mend that sample, or raise model.vocab_size"
            )


def ids_text(ids: np.ndarray) -> str:
    """Sample ids as a message shows them.

    >>> ids_text(np.arange(18))
    '0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 2 more'
    """
    shown = ", ".join(str(int(i)) for i in ids[:_SHOWN])
    return shown if len(ids) <= _SHOWN else f"{shown} and {len(ids) - _SHOWN} more"
