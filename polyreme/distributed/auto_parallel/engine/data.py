"""Data of an Engine: loaders, epochs, and batches split into inputs and labels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from polyreme.errors import ConfigError
from polyreme.hapi.callback import Callback, Logs
from polyreme.hapi.data import length_of
from polyreme.hapi.input_spec import InputSpec
from polyreme.io import DataLoader


class EngineLoader:
    """Batches of a loader, epochs times over, at most steps_per_epoch of each.

    sample_split: how many of a batch's items are inputs.
    """

    loader: Any
    epochs: int
    steps_per_epoch: int | None
    sample_split: int | None

    def __init__(
        self, loader: Any, epochs: int = 1, steps_per_epoch: int | None = None, sample_split: int | None = None
    ) -> None:
        check_counts("dataloader", epochs=epochs, steps_per_epoch=steps_per_epoch, sample_split=sample_split)
        self.loader, self.epochs, self.steps_per_epoch, self.sample_split = (
            loader,
            epochs,
            steps_per_epoch,
            sample_split,
        )

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.epochs):
            yield from itertools.islice(self.loader, self.steps_per_epoch)

    def __call__(self) -> Iterator[Any]:
        return iter(self)

    def __len__(self) -> int:
        whole = len(self.loader)
        return self.epochs * (whole if self.steps_per_epoch is None else min(whole, self.steps_per_epoch))


def as_loader(call: str, data: Any, batch_size: int | None, collate_fn: Callable[..., Any] | None) -> Any:
    """A loader over a Dataset in its order, all samples; one that was made already is taken as it is.

    Raises ConfigError for anything that has neither items nor an iterator.
    """
    if not hasattr(data, "__getitem__") and not hasattr(type(data), "__iter__"):
        raise ConfigError(f"Engine.{call}: data is a {type(data).__name__}; give a Dataset or a DataLoader")
    if isinstance(data, (DataLoader, EngineLoader)) or not hasattr(data, "__getitem__"):
        if collate_fn is not None:
            raise ConfigError(f"Engine.{call}: collate_fn is for a Dataset; give it to the loader itself")
        return data
    return DataLoader(data, batch_size=batch_size, collate_fn=collate_fn)


def steps_in(loader: Any, limit: int | None) -> int | None:
    """Batches an epoch, None if not known."""
    whole = length_of(loader)
    return whole if limit is None else limit if whole is None else min(limit, whole)


def in_order(values: Mapping[str, Any], specs: Sequence[InputSpec]) -> list[Any]:
    """A batch given by names, in the order of the specs. Raises ConfigError for names that are not theirs."""
    names = [spec.name for spec in specs]
    if not names or None in names:
        raise ConfigError(
            f"a batch by names ({', '.join(values)}) needs named specs: prepare(inputs_spec=[InputSpec(shape, dtype, "
            "name)], labels_spec=...), or give a list of inputs and labels"
        )
    if set(values) != set(names):
        raise ConfigError(f"a batch by names has {sorted(values)}; the specs are {names}: give just these")
    return [values[str(name)] for name in names]


class History(Callback):
    """Results of each epoch: `history` has a list by name (loss, metrics, lr, val_loss, ...), `epoch` their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch: list[int] = []
        self.history: dict[str, list[Any]] = {}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.epoch, self.history = [], {}

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.epoch.append(epoch)
        for name, value in (logs or {}).items():
            if name not in ("step", "batch_size"):
                self.history.setdefault(name, []).append(value)


def single_loss(logs: dict[str, Any]) -> dict[str, Any]:
    """logs with the loss as a number where there is one alone."""
    loss = logs.get("loss")
    return {**logs, "loss": loss[0]} if isinstance(loss, list) and len(loss) == 1 else logs


def check_counts(call: str, **counts: Any) -> None:
    """Raises ConfigError for a count that is not None nor a whole number of at least 1."""
    for name, value in counts.items():
        wrong = isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1
        if value is not None and wrong:
            raise ConfigError(f"Engine.{call}: {name}={value!r}; give a whole number of at least 1")
