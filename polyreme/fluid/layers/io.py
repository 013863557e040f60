"""fluid.layers.data, and the Variables that loaders feed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.errors import ConfigError
from polyreme.fluid.mode import begin
from polyreme.program import mode
from polyreme.program.block import Variable


def data(
    name: str, shape: Sequence[int | None], append_batch_size: bool = True, dtype: Any = "float32", lod_level: int = 0,
    type: Any = "lod_tensor", stop_gradient: bool = True,
) -> Variable:  # fmt: skip
    """A Variable that is fed, with the batch in front of shape.

    append_batch_size: False, like a None or negative size in shape, takes shape as it is. What is fed is checked, as
    that of fluid.data is. Raises ConfigError for another type than a tensor.
    """
    if type != "lod_tensor":
        raise ConfigError(f"fluid.layers.data({name!r}): type={type!r}; what is fed is a tensor")
    sizes = [shape] if isinstance(shape, int) else list(shape)
    whole = not append_batch_size or any(s is None or s < 0 for s in sizes)
    begin()
    made = mode.data(name, sizes if whole else [-1, *sizes], dtype, lod_level)
    made.stop_gradient = stop_gradient
    return made


__all__ = ["data"]
