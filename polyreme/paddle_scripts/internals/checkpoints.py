"""State dicts of ShardedWeights, as trainers of large models make, convert and save them.

A Tensor is global here, so every weight is whole, and what PaddlePaddle gathers from ranks is there already.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.core import state
from polyreme.distributed.checkpoint import ShardedWeight, build_sharded_state_dict, shard_weight
from polyreme.distributed.checkpoint import save_state_dict as _save_state_dict
from polyreme.distributed.checkpoint.conversion import ConversionRules
from polyreme.eager.tensor import Tensor
from polyreme.errors import ShapeError
from polyreme.io.serialization import save


@dataclass(frozen=True)
class ShardedWeightDesc:
    """What a ShardedWeight is, without its Tensor."""

    key: str
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    dtype: str | None = None


@dataclass
class LocalTensorMetadata:
    """A box of a saved tensor."""

    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    global_shape: tuple[int, ...] | None = None
    is_flattened: bool = False
    flattened_range: tuple[int, int] | None = None


@dataclass
class Metadata:
    """What a saved state dict has: key -> its boxes."""

    state_dict_metadata: dict[str, list[LocalTensorMetadata]] = field(default_factory=dict)


def make_replicated_sharded_weight(key: str, tensor: Tensor) -> ShardedWeight:
    """A weight that is whole."""
    return shard_weight(key, tensor, 0, None) if tensor.ndim else ShardedWeight(key, tensor, (), (), ())


def make_tp_sharded_weight_for_checkpoint(key: str, tensor: Tensor, tensor_parallel_axis: int = 0) -> ShardedWeight:
    """A weight whose dim the model-parallel group splits; it is global here."""
    return shard_weight(key, tensor, tensor_parallel_axis, None)


def create_sharded_weight_with_new_local(
    new_key: str, new_local_tensor: Tensor, reference_tensor: ShardedWeight
) -> ShardedWeight:
    """A Tensor that lies in the whole as another weight does. Raises ShapeError for another shape."""
    if tuple(new_local_tensor.shape) != reference_tensor.local_shape:
        raise ShapeError(
            f"{new_key}: shape {list(new_local_tensor.shape)}, its reference has {list(reference_tensor.local_shape)}"
        )
    return ShardedWeight(
        new_key,
        new_local_tensor,
        reference_tensor.local_shape,
        reference_tensor.global_shape,
        reference_tensor.global_offset,
    )


def full_param(
    sharded_state_dict: Mapping[str, ShardedWeight], aoa_config: Mapping[str, Any] | None = None, **_: Any
) -> Iterator[tuple[str, Tensor]]:
    """(key, whole Tensor) of all weights, after the rules of aoa_config; groups have nothing to gather."""
    arrays = {key: state.read(weight.local_tensor) for key, weight in sharded_state_dict.items()}
    for key, array in ConversionRules(aoa_config or {}, arrays).convert(arrays).items():
        yield key, Tensor(array)


def save_state_dict(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str],
    process_group: Any = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    async_save: bool = False,
    safetensors: bool = False,
    save_replicas: bool = False,
) -> None:
    """distributed.save_state_dict, and beside the checkpoint a file of its shapes, which trainers read."""
    _save_state_dict(
        state_dict, path, process_group, coordinator_rank, unique_id, async_save, safetensors, save_replicas
    )
    boxes = {key: [_box(value)] for key, value in state_dict.items() if isinstance(value, (Tensor, ShardedWeight))}
    save(Metadata(boxes), Path(path) / f"{unique_id or 0}.metadata")


def _box(value: Tensor | ShardedWeight) -> LocalTensorMetadata:
    if isinstance(value, Tensor):
        shape = tuple(value.shape)
        return LocalTensorMetadata((0,) * len(shape), shape, np.dtype(value.dtype).name, shape)
    dtype = np.dtype(value.local_tensor.dtype).name
    return LocalTensorMetadata(value.global_offset, value.local_shape, dtype, value.global_shape)


def layer_state(layer: Any, prefix: str = "") -> dict[str, ShardedWeight]:
    """Layer.sharded_state_dict: of a layer and of those below it, each by its own sharded_state_dict."""
    weights = build_sharded_state_dict(layer.state_dict(include_sublayers=False), prefix=prefix)
    for name, child in layer.named_children():
        weights.update(child.sharded_state_dict(structured_name_prefix=f"{prefix}{name}."))
    return weights


def optimizer_state(optimizer: Any, weights: Mapping[str, ShardedWeight]) -> dict[str, ShardedWeight]:
    """Optimizer.sharded_state_dict: what an optimizer keeps, by the keys of the weights: key.moment1_0, key.w_0.

    Filling them is filling the optimizer.
    """
    keys: dict[str, str] = {}
    for key, weight in sorted(weights.items()):
        keys.setdefault(weight.local_tensor.name, key)
    values = {name: value for name, value in optimizer.state_dict().items() if isinstance(value, Tensor)}
    result: dict[str, ShardedWeight] = {}
    for index, parameter in enumerate(optimizer._parameters):
        for name in [n for n in values if n.startswith(f"{parameter.name}_")]:
            tensor, slot = values.pop(name), name.removeprefix(f"{parameter.name}_")
            scalar = slot.removesuffix("_0")
            if scalar in optimizer._shared.first.scalars:
                tensor = _Count(tensor, optimizer, scalar, index)
            key = f"{keys[parameter.name]}.{'w_0' if slot == 'master_0' else slot}"
            result[key] = ShardedWeight(key, tensor, tensor.shape, tensor.shape, (0,) * tensor.ndim)
    return result


class _Count(Tensor):
    """A number that an optimizer keeps for a parameter; setting it sets the optimizer's."""

    def __init__(self, value: Tensor, optimizer: Any, name: str, index: int) -> None:
        super().__init__(state.read(value))
        self._of = optimizer, name, index

    def set_value(self, value: Any) -> None:
        optimizer, name, index = self._of
        values = optimizer._shared.values(name)
        values[index] = np.asarray(value)
        optimizer._shared.set_values(name, values)
        super().set_value(value)


__all__: Sequence[str] = [
    "LocalTensorMetadata",
    "Metadata",
    "ShardedWeightDesc",
    "create_sharded_weight_with_new_local",
    "full_param",
    "make_replicated_sharded_weight",
    "make_tp_sharded_weight_for_checkpoint",
    "save_state_dict",
]
