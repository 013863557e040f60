"""fluid.data, fluid.embedding and fluid.one_hot, which take shapes and ids as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.fluid.layer import layer
from polyreme.fluid.layers.nn import rows_of
from polyreme.fluid.layers.shape import one_hot_of
from polyreme.program import mode
from polyreme.program.block import Variable


@layer
def data(name: str, shape: Sequence[int | None], dtype: Any = "float32", lod_level: int = 0) -> Variable:
    """A Variable that is fed: shape is whole, with None or -1 for a size that may differ; what is fed is checked."""
    return mode.data(name, shape, dtype, lod_level)


@layer
def embedding(
    input: Any, size: Sequence[int], is_sparse: bool = False, is_distributed: bool = False,
    padding_idx: int | None = None, param_attr: Any = None, dtype: Any = "float32",
) -> Any:  # fmt: skip
    """Rows of a table of shape size for ids [*b] -> [*b, width]; is_sparse and the others as in layers.embedding."""
    return rows_of("embedding", input, size, padding_idx, param_attr, dtype, is_sparse)


@layer
def one_hot(input: Any, depth: int, allow_out_of_range: bool = False) -> Any:
    """1 at each id, 0 elsewhere: ids [*b] -> float32 [*b, depth]; allow_out_of_range: zeros for an id that is none."""
    return one_hot_of(input, depth, allow_out_of_range)


__all__ = ["data", "embedding", "one_hot"]
