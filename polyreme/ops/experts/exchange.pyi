"""For type checkers: polyreme.ops.experts.exchange. Written by tools/write_stubs.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from jax import Array
from polyreme.kernels.experts import Dispatcher
from polyreme.kernels.experts import ExpertSplit
from polyreme.kernels.experts import ExpertWeights
from polyreme.kernels.experts import RowFFN
from typing import Any

@dataclass(frozen=True)
class ExpertExchange:
    how: Dispatcher
    split: ExpertSplit

    def compute(self, x: Array, choices: Array, gates: Array, weights: ExpertWeights, activation: str, row_capacity: int | None) -> Array:
        ...

    def compute_rows(self, x: Array, choices: Array, gates: Array, weights: Sequence[Any], stacked: Sequence[bool], count: int, ffn: RowFFN) -> Array:
        ...
def exchange(x: Sequence[int], weight: Sequence[int], top_k: int) -> ExpertExchange | None: ...
