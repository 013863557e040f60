"""ShardedWeight: a box of a tensor with its place in the whole, and state dicts of them.

A Tensor here is global, so what a process holds of it is all of it unless its group is of processes, each
with a part of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from polyreme.distributed.communication.group import Group, resolve
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, ShapeError


class ShardedWeight:
    """A box of a tensor: local_tensor, of local_shape, begins at global_offset of a whole of global_shape.

    is_flattened: local_tensor has one dim and is the part flattened_range (a slice) of the box written in one row.
    Raises ShapeError if local_tensor has another shape, or the box does not lie in the whole.
    """

    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]

    def __init__(
        self,
        key: str,
        local_tensor: Tensor,
        local_shape: Sequence[int],
        global_shape: Sequence[int],
        global_offset: Sequence[int],
        is_flattened: bool = False,
        flattened_range: slice | None = None,
    ) -> None:
        self.key = key
        self.local_tensor = local_tensor
        self.local_shape, self.global_shape, self.global_offset = map(tuple, (local_shape, global_shape, global_offset))
        self.is_flattened = is_flattened
        self.flattened_range = flattened_range
        self._check()

    def _check(self) -> None:
        box = list(zip(self.global_offset, self.local_shape, self.global_shape, strict=False))
        lengths = {len(self.global_offset), len(self.local_shape), len(self.global_shape)}
        if len(lengths) > 1 or any(not 0 <= start <= start + size <= whole for start, size, whole in box):
            raise ShapeError(
                f"ShardedWeight {self.key!r}: a box of shape {list(self.local_shape)} at {list(self.global_offset)} is "
                f"not inside a tensor of shape {list(self.global_shape)}"
            )
        if self.is_flattened:
            if self.flattened_range is None:
                raise ConfigError(
                    f"ShardedWeight {self.key!r}: is_flattened needs a flattened_range, such as slice(0, 8)"
                )
        elif tuple(self.local_tensor.shape) != self.local_shape:
            raise ShapeError(
                f"ShardedWeight {self.key!r}: local_tensor has shape {list(self.local_tensor.shape)}, local_shape says "
                f"{list(self.local_shape)}"
            )

    def __repr__(self) -> str:
        flat = f", flattened_range={self.flattened_range}" if self.is_flattened else ""
        return (
            f"ShardedWeight(key={self.key!r}, local_shape={self.local_shape}, global_shape={self.global_shape}, "
            f"global_offset={self.global_offset}{flat})"
        )


ShardedStateDict = dict[str, ShardedWeight] | OrderedDict[str, ShardedWeight]
"""Key -> ShardedWeight."""


def shard_weight(key: str, weight: Tensor, axis: int, group: Group | None) -> ShardedWeight:
    """The part of a tensor that this process holds; the group splits it along dim `axis`.

    In a group of processes weight is this one's part: all parts are equal, in the order of ranks. In a group of mesh
    axes, and without one, weight is global: the box is the whole. Raises ConfigError for an axis that weight has not.

    >>> shard_weight("w", Tensor([[1.0, 2.0]]), 0, None)
    ShardedWeight(key='w', local_shape=(1, 2), global_shape=(1, 2), global_offset=(0, 0))
    """
    shape, ndim = tuple(weight.shape), len(weight.shape)
    if isinstance(axis, bool) or not isinstance(axis, int) or not -ndim <= axis < ndim:
        raise ConfigError(f"shard_weight: axis={axis!r} is not a dim of {key!r}, whose shape is {list(shape)}")
    ways, rank = 1, 0
    if group is not None and not group.axes:
        found = resolve(group, "shard_weight")
        ways, rank = (found.nranks, found.rank) if found is not None else (1, 0)
    dim = axis % ndim
    whole = tuple(n * ways if d == dim else n for d, n in enumerate(shape))
    offset = tuple(n * rank if d == dim else 0 for d, n in enumerate(shape))
    return ShardedWeight(key, weight, shape, whole, offset)


def build_sharded_state_dict(
    state_dict: Mapping[str, Tensor], shard_rules: Mapping[str, int] | None = None, prefix: str = ""
) -> dict[str, ShardedWeight]:
    """prefix + key -> ShardedWeight for every Tensor of a state dict.

    shard_rules: key -> the dim that the model-parallel group splits. Tensors of this library are global under that
    group too, so a rule only says which dim must be there. Raises ConfigError for a rule whose key is not in
    state_dict, or whose dim its Tensor has not.
    """
    rules = dict(shard_rules or {})
    unknown = [key for key in rules if key not in state_dict]
    if unknown:
        raise ConfigError(f"build_sharded_state_dict: shard_rules names {unknown[:10]}, not in the state dict")
    return {
        prefix + key: shard_weight(prefix + key, tensor, rules[key], None)
        if key in rules
        else ShardedWeight(prefix + key, tensor, tensor.shape, tensor.shape, (0,) * len(tensor.shape))
        for key, tensor in state_dict.items()
    }
