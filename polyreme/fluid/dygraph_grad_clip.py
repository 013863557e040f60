"""Gradient clips for minimize(grad_clip=) in dygraph, under 1.7's names and parameters."""

from __future__ import annotations

from typing import Any

from polyreme.errors import ConfigError
from polyreme.nn.clip import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue


class GradClipByValue(ClipGradByValue):
    """Every element of a gradient into [min_value, max_value]; [-min_value, min_value] if there is no max_value."""

    def __init__(self, min_value: float, max_value: float | None = None) -> None:
        low, high = (-min_value, min_value) if max_value is None else (min_value, max_value)
        super().__init__(max=high, min=low)


class GradClipByNorm(ClipGradByNorm):
    """Each gradient scaled down to an L2 norm of at most clip_norm."""

    def __init__(self, clip_norm: float) -> None:
        super().__init__(clip_norm)


class GradClipByGlobalNorm(ClipGradByGlobalNorm):
    """All gradients scaled by one factor, so that their L2 norm together is at most max_global_norm.

    dtype: "float32"; the norm is summed in it. Raises ConfigError for another.
    """

    def __init__(self, max_global_norm: float, dtype: Any = "float32") -> None:
        if dtype != "float32":
            raise ConfigError(f"GradClipByGlobalNorm: dtype={dtype!r}; norms are summed in float32, leave it out")
        super().__init__(max_global_norm)


__all__ = ["GradClipByGlobalNorm", "GradClipByNorm", "GradClipByValue"]
