"""Sums, means and other reductions; a number has shape [1]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyreme.fluid.layer import layer, one
from polyreme.ops import reduce as rd


def _reduction(name: str, fn: Callable[..., Any], what: str) -> Callable[..., Any]:
    def run(input: Any, dim: Any = None, keep_dim: bool = False, name: str | None = None) -> Any:
        return one(fn(input, dim, keepdim=keep_dim))

    run.__name__ = run.__qualname__ = name
    run.__doc__ = f"{what} over dim (an int, a list, or None for all of them); shape [1] where no dim is left."
    return layer(run)


reduce_sum: Callable[..., Any] = _reduction("reduce_sum", rd.sum, "Sum")
reduce_mean: Callable[..., Any] = _reduction("reduce_mean", rd.mean, "Mean")
reduce_max: Callable[..., Any] = _reduction("reduce_max", rd.max, "Largest element")
reduce_min: Callable[..., Any] = _reduction("reduce_min", rd.min, "Smallest element")
reduce_prod: Callable[..., Any] = _reduction("reduce_prod", rd.prod, "Product")
reduce_all: Callable[..., Any] = _reduction("reduce_all", rd.all, "Whether all are true")
reduce_any: Callable[..., Any] = _reduction("reduce_any", rd.any, "Whether any is true")


@layer
def mean(x: Any, name: str | None = None) -> Any:
    """The mean of all elements, of shape [1]."""
    return one(rd.mean(x))


__all__ = ["mean", "reduce_all", "reduce_any", "reduce_max", "reduce_mean", "reduce_min", "reduce_prod", "reduce_sum"]
