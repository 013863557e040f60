"""to_distributed: a model, optimizer and loader written for one device, on many by the best plan that is found."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from polyreme.core.layout import Layout
from polyreme.distributed.auto_parallel.engine.choose import choose_plan
from polyreme.distributed.auto_parallel.layers.shard_optimizer import shard_optimizer
from polyreme.distributed.auto_parallel.tensors.moves import each_tensor
from polyreme.distributed.data_parallel import spread_batch
from polyreme.errors import ConfigError, DeviceError
from polyreme.hapi.input_spec import InputSpec
from polyreme.io.dataloader import DataLoader
from polyreme.io.dataset import IterableDataset
from polyreme.nn.layer import Layer
from polyreme.optimizer import Optimizer
from polyreme.planner.space import Space

_log = logging.getLogger("polyreme.distributed.auto_parallel")


@dataclass
class ToDistributedConfig:
    """input_spec: InputSpecs of the model's inputs; by default they are taken from the dataset's first sample.
    sequence_parallel: whether activations between parallel layers may be split along the sequence."""

    input_spec: Sequence[InputSpec] | None = None
    sequence_parallel: bool = False


class SpreadLoader:
    """Batches of a DataLoader, laid out over the devices of a plan by their dim 0."""

    dataloader: DataLoader
    layout: Layout

    def __init__(self, dataloader: DataLoader, layout: Layout) -> None:
        self.dataloader, self.layout = dataloader, layout

    def __len__(self) -> int:
        return len(self.dataloader)

    def __call__(self) -> Iterator[Any]:
        """The same as iter(loader)."""
        return iter(self)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.dataloader:
            yield each_tensor(batch, lambda x: spread_batch(x, self.layout) if x.ndim else x)


def to_distributed(
    model: Layer,
    optimizer: Optimizer,
    dataloader: DataLoader,
    device_num: int,
    node_num: int = 1,
    config: ToDistributedConfig | None = None,
) -> tuple[Layer, Optimizer, SpreadLoader]:
    """A model, its optimizer and its loader on device_num * node_num devices: -> the model and optimizer, changed in
    place, and a loader of the same batches.

    The model's dims are inferred from its ops, and the planner chooses among data, tensor and expert parallelism and
    sharding stages by the time that a step takes and the memory it needs; the log says what and why. The plan is in
    force from then on. Pipelines are left to Engine(strategy="auto"), which runs their stages.

    Raises DeviceError for more devices than there are; ConfigError for other kinds of arguments, and if no plan fits.
    """
    for what, given, kind in (
        ("model", model, Layer), ("optimizer", optimizer, Optimizer), ("dataloader", dataloader, DataLoader),
    ):  # fmt: skip
        if not isinstance(given, kind):
            raise ConfigError(f"to_distributed: {what} is a {type(given).__name__}; give a {kind.__name__}")
    config = config if config is not None else ToDistributedConfig()
    devices = jax.devices()[: _count("device_num", device_num) * _count("node_num", node_num)]
    if len(devices) < device_num * node_num:
        raise DeviceError(f"to_distributed: {device_num * node_num} devices are asked for, {len(devices)} are there")
    inputs = config.input_spec if config.input_spec is not None else _inputs(model, dataloader)
    size = dataloader.batch_size
    chosen = choose_plan(
        model, inputs, optimizer=optimizer, batch=size, devices=devices, space=_space(config.sequence_parallel)
    )
    layout = chosen.apply()
    _log.info("to_distributed: %s", chosen)
    return model, shard_optimizer(optimizer), SpreadLoader(dataloader, layout)


def _space(sequence_parallel: bool) -> Space:
    """The plans to choose among: those that one program over all devices runs."""
    ways = (False, True) if sequence_parallel else (False,)
    return Space(axes=("dp", "sharding", "mp", "ep"), recompute=("none", "full"), offload=((),), sequence_parallel=ways)


def _inputs(model: Layer, dataloader: DataLoader) -> list[InputSpec]:
    """The inputs of the model in a batch: by name from a dict, else as many entries as forward has parameters."""
    if isinstance(dataloader.dataset, IterableDataset):
        raise ConfigError("to_distributed: the dataset is iterable, and is not begun here; give config.input_spec")
    batch = dataloader.collate_fn([dataloader.dataset[0]])
    parameters = [p for p in inspect.signature(model.forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    if isinstance(batch, Mapping):
        values = [batch[p.name] for p in parameters if p.name in batch]
    else:
        listed = list(batch) if isinstance(batch, (list, tuple)) else [batch]
        needed = sum(p.default is p.empty and p.kind is not p.VAR_POSITIONAL for p in parameters)
        values = listed[: max(1, needed)]
    return [InputSpec([None, *np.shape(v)[1:]], np.asarray(v).dtype.name) for v in values]


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"to_distributed: {name}={value!r}; give a whole number of at least 1")
    return value
