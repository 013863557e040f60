"""Calls that XLA cannot look into, run on each device's own pieces as the op's sharding rule says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from polyreme.core.sharding_rule import DimNames, ShardingRule


def partitioned(run: Callable[..., Any], arrays: Sequence[Any], rule: ShardingRule, many: type | None) -> Any:
    """run(*arrays), each device on its own pieces. rule: of this call, every dim named.

    many: tuple or list, as run gives several results; None for one.
    """

    def partition(mesh: Any, given: Sequence[Any], result: Any) -> tuple:
        axes = _axes(rule, given)
        ins, outs = (
            [NamedSharding(mesh, PartitionSpec(*(axes.get(name) for name in tensor))) for tensor in side]
            for side in (rule.inputs, rule.outputs)
        )
        return mesh, run, (outs[0] if many is None else many(outs)), tuple(ins)

    split = custom_partitioning(lambda *given: run(*given))
    split.def_partition(partition, sharding_rule=f"{_show(rule.inputs)} -> {_show(rule.outputs)}")
    return split(*arrays)


def _axes(rule: ShardingRule, given: Sequence[Any]) -> dict[str | None, Any]:
    """Name -> the mesh axes that split it, as the first input that has it lies; no axis splits two names."""
    axes: dict[str | None, Any] = {}
    used: set[str] = set()
    for tensor, array in zip(rule.inputs, given, strict=True):
        for name, entry in zip(tensor, tuple(array.sharding.spec), strict=False):
            entries = {entry} if isinstance(entry, str) else set(entry or ())
            if entries and rule.split_name(name) is not None and name not in axes and entries.isdisjoint(used):
                axes[name] = entry
                used |= entries
    return axes


def _show(tensors: Sequence[DimNames]) -> str:
    return ", ".join(" ".join(str(name) for name in tensor) for tensor in tensors)
