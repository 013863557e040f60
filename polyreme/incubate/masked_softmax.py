"""Softmax under a mask, in the spellings of incubate, and the mark of a final loss.

XLA makes one kernel of the mask and the softmax; there is nothing to fuse by hand.
"""

from __future__ import annotations

from typing import Any

from polyreme.errors import ConfigError, ShapeError
from polyreme.ops import reduce
from polyreme.ops.activation import softmax
from polyreme.ops.creation import ones, tril
from polyreme.ops.indices.gather import where


def softmax_mask_fuse(x: Any, mask: Any, name: str | None = None) -> Any:
    """softmax(x + mask) over the last dim; mask broadcasts to x: [batch, 1, seq, keys] to [batch, heads, seq, keys]."""
    return softmax(x + mask)


def softmax_mask_fuse_upper_triangle(x: Any) -> Any:
    """softmax of x [*, seq, seq] over the keys up to each query's own: what lies above the diagonal gets 0."""
    if len(x.shape) < 2 or x.shape[-1] != x.shape[-2]:
        raise ShapeError(f"softmax_mask_fuse_upper_triangle: x {list(x.shape)}; needs [*, seq, seq]")
    return softmax(where(tril(ones(x.shape[-2:], "bool")), x, -float("inf")))


_REDUCTIONS = {"sum": 0, "mean": 1, "none": 2}


def identity_loss(x: Any, reduction: str | int = "none") -> Any:
    """x as the final loss: its sum ("sum" or 0), its mean ("mean" or 1), or x itself ("none" or 2)."""
    kind = _REDUCTIONS.get(reduction, reduction) if isinstance(reduction, str) else reduction
    if kind == 0:
        return reduce.sum(x)
    if kind == 1:
        return reduce.mean(x)
    if kind != 2:
        raise ConfigError(f"identity_loss: reduction={reduction!r}; choose 'sum', 'mean', 'none' or 0, 1, 2")
    return x
