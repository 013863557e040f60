"""Exchange of tokens with their experts when the plan in force splits experts, or tokens, over devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from polyreme.core import layout
from polyreme.core.layout import Layout
from polyreme.kernels import select
from polyreme.kernels.experts import (
    Axes,
    Dispatcher,
    ExpertSplit,
    ExpertWeights,
    RowFFN,
    exchanged_experts,
    exchanged_row_experts,
)


@dataclass(frozen=True)
class ExpertExchange:
    """Experts over devices by one dispatcher."""

    how: Dispatcher
    split: ExpertSplit

    def compute(
        self, x: Array, choices: Array, gates: Array, weights: ExpertWeights, activation: str, row_capacity: int | None
    ) -> Array:
        """kernels.experts of arrays that the split lays out."""
        return exchanged_experts(
            x, choices, gates, weights, activation, split=self.split, how=self.how, row_capacity=row_capacity
        )

    def compute_rows(
        self, x: Array, choices: Array, gates: Array, weights: Sequence[Any], stacked: Sequence[bool], count: int,
        ffn: RowFFN,
    ) -> Array:  # fmt: skip
        """kernels.row_experts of whole weights, of which the stacked ones have the experts in front."""
        by_expert = PartitionSpec(self.split.experts or None)
        specs = [by_expert if front else PartitionSpec() for front in stacked]
        return exchanged_row_experts(
            x, choices, gates, list(weights), count, ffn, specs=specs, split=self.split, how=self.how
        )


def exchange(x: Sequence[int], weight: Sequence[int], top_k: int) -> ExpertExchange | None:
    """The ExpertExchange for experts of weights [e, d, f] and tokens of shape x, [batch, seq, d] or [batch, d]; None on
    one device.

    Axes that split experts and no token outside of them are made to split tokens too, where these divide.
    """
    placed = layout.active.layout
    if placed is None or placed.mesh.size == 1:
        return None
    act = placed.plan.strategy.rule("act")
    tokens = [_dividing(placed, act.get(dim, ()), n) for dim, n in zip(("batch", "block_seq"), x[:-1], strict=False)]
    experts = _dividing(placed, act.get("expert", ()), weight[0])
    inner = tuple(a for a in _dividing(placed, act.get("expert_ffn", ()), weight[2]) if a not in experts)
    apart = [axis for axes in tokens for axis in axes]
    missing = tuple(axis for axis in experts if axis not in apart)
    for i in reversed(range(len(tokens))):
        if missing and x[i] % _ways(placed, (*tokens[i], *missing)) == 0:
            tokens[i] += missing
            break
    inner = tuple(axis for axis in inner if axis not in apart)
    parts = placed.plan.overlap.moe
    split = ExpertSplit(placed.mesh, tuple(tokens), experts, inner, _between_nodes(placed, experts), parts)
    has_ragged = select.backend() == "tpu" and len(split.levels) == 1
    how = placed.plan.expert_dispatcher(split.ways(experts), top_k, has_ragged)
    return ExpertExchange(cast(Dispatcher, how), split)


def _between_nodes(placed: Layout, experts: Axes) -> Axes:
    """Those of the axes that rows go along last: the outermost, or with "auto" those that lead to other processes, if
    the ones behind do not; none for one all-to-all."""
    if placed.plan.expert_all_to_all == "two_level":
        return experts[:1]
    processes = np.vectorize(lambda device: device.process_index, otypes=[int])(placed.mesh.devices)
    leads = [bool(np.diff(processes, axis=placed.mesh.axis_names.index(axis)).any()) for axis in experts]
    count = sum(leads)
    is_split = placed.plan.expert_all_to_all == "auto" and all(leads[:count]) and count < len(experts)
    return experts[:count] if is_split else ()


def _dividing(placed: Layout, axes: Axes, size: int) -> Axes:
    """Those of the axes that have several devices; none if they do not divide the size."""
    live = tuple(axis for axis in axes if placed.mesh.shape.get(axis, 1) > 1)
    return live if size % _ways(placed, live) == 0 else ()


def _ways(placed: Layout, axes: Axes) -> int:
    return math.prod(placed.mesh.shape[axis] for axis in axes)
