"""For type checkers: polyreme.ops.attention.over_devices. Written by tools/write_stubs.py."""

from collections.abc import Callable
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from jax import Array
from polyreme import kernels
from polyreme.kernels.ring_attention import Split
from typing import Any

WHOLE: Any
@dataclass(frozen=True)
class SegmentExchange:
    how: str
    split: Split
    repeat: int
    reorders: bool = ...

    def attend(self, q: Array, k: Array, v: Array, **options: Any) -> Array:
        ...

    def attend_columns(self, q: Array, k: Array, v: Array, columns: kernels.Columns, **options: Any) -> tuple[Array, Array]:
        ...

    def _sent(self, *arrays: Array) -> tuple[Array, ...]:
        ...

    def _home(self, x: Array, dim: int=1) -> Array:
        ...
Chooser = Callable[[Sequence[int], Sequence[int]], SegmentExchange | None]
def exchanging(chooser: Chooser) -> AbstractContextManager[None]: ...
def exchange(query: Sequence[int], key: Sequence[int], whole: bool = False, causal: bool = False) -> SegmentExchange | None: ...
def zigzag_ways(seq: int, heads: int, kv_heads: int) -> int: ...
def token_ways(shape: Sequence[int]) -> tuple[int, int]: ...
def join_tokens(x: Array, ways: tuple[int, int], kept: int = 1) -> Array: ...
def part_tokens(x: Array, shape: Sequence[int], ways: tuple[int, int]) -> Array: ...
