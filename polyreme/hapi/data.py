"""What Model makes of the data it is given: loaders, batches as Tensors, and checks against InputSpecs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.hapi.input_spec import InputSpec
from polyreme.hapi.step import as_list
from polyreme.io import DataLoader, IterableDataset
from polyreme.nn import Layer


def as_specs(what: str, values: Any) -> list[InputSpec]:
    """The InputSpecs given, as a list. Raises ConfigError for anything else."""
    specs = as_list(values)
    for spec in specs:
        if not isinstance(spec, InputSpec):
            raise ConfigError(f"Model: {what} holds a {type(spec).__name__}; give InputSpec(shape, dtype)")
    return specs


def as_tensors(what: str, values: Any, specs: list[InputSpec]) -> list[Tensor]:
    """Values of a batch as Tensors of their specs' dtypes.

    Raises ShapeError or DTypeError where one does not fit its spec. Labels [batch] fit [batch, 1], and the other way
    round, as losses take both; integers fit wider integers.
    """
    tensors = [v if isinstance(v, Tensor) else to_tensor(v) for v in as_list(values)]
    if specs and len(tensors) > len(specs):
        raise ShapeError(f"Model: {len(specs)} {what}s are specified, the batch has {len(tensors)}")
    for index, (tensor, spec) in enumerate(zip(tensors, specs, strict=False)):
        if not _shape_fits(spec.shape, tensor.shape, what == "label"):
            raise ShapeError(
                f"Model: {what} {index} is specified as {list(spec.shape)}, the batch has {list(tensor.shape)}"
            )
        if spec.dtype == tensor.dtype:
            continue
        if not (
            dtypes.is_integer(tensor.dtype) and np.can_cast(tensor.dtype, spec.dtype) and dtypes.is_integer(spec.dtype)
        ):
            raise DTypeError(
                f"Model: {what} {index} is specified as {spec.dtype.name}, the batch has {tensor.dtype.name}"
            )
        tensors[index] = tensor.astype(spec.dtype)
    return tensors


def _shape_fits(spec: Sequence[int | None], shape: Sequence[int], last_one_is_optional: bool) -> bool:
    longer, shorter = sorted((list(spec), list(shape)), key=len, reverse=True)
    if last_one_is_optional and longer == [*longer[: len(shorter)], 1]:
        longer.pop()
    return len(longer) == len(shorter) and all(n == m or None in (n, m) for n, m in zip(longer, shorter, strict=True))


def needed_arguments(network: Layer) -> int:
    """How many positional arguments forward needs, at least one."""
    forward = network.forward
    params = inspect.signature(getattr(forward, "dygraph_function", forward)).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return max(1, sum(p.kind in plain and p.default is p.empty for p in params))


def as_loader(data: Any, batch_size: int, shuffle: bool, drop_last: bool, num_workers: int) -> Any:
    """A loader over a Dataset; a DataLoader, or anything else that only iterates, is taken as it is."""
    if not hasattr(data, "__getitem__") and not hasattr(type(data), "__iter__"):
        raise ConfigError(f"Model: data is a {type(data).__name__}; give a Dataset or a DataLoader")
    if isinstance(data, DataLoader) or not hasattr(data, "__getitem__"):
        return data
    # a stream has no order of its own to shuffle
    shuffle = shuffle and not isinstance(data, IterableDataset)
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, num_workers=num_workers)


def length_of(loader: Any) -> int | None:
    """Batches an epoch, None if not known."""
    try:
        return len(loader)
    except TypeError:
        return None


def two_sizes(batch_size: Any) -> tuple[int, int]:
    """(training, evaluation) batch size."""
    if isinstance(batch_size, (list, tuple)):
        if len(batch_size) != 2:
            raise ConfigError(f"Model.fit: batch_size={batch_size!r}; give one size, or [train size, eval size]")
        return batch_size[0], batch_size[1]
    return batch_size, batch_size


def samples_in(inputs: Sequence[Tensor]) -> int:
    """Samples in a batch: the first dim of its first input."""
    return inputs[0].shape[0] if inputs and inputs[0].shape else 1


def check_count(call: str, name: str, value: Any) -> None:
    """Raises ConfigError unless value is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ConfigError(f"Model.{call}: {name}={value!r}; give a whole number of at least 1")
