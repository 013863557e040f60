"""fluid.contrib.mixed_precision: static.amp by 1.7's names and defaults."""

from __future__ import annotations

from typing import Any

from polyreme.static import amp
from polyreme.static.amp import AutoMixedPrecisionLists, OptimizerWithMixedPrecision


def decorate(
    optimizer: Any, amp_lists: AutoMixedPrecisionLists | None = None, init_loss_scaling: float = 1.0,
    incr_every_n_steps: int = 1000, decr_every_n_nan_or_inf: int = 2, incr_ratio: float = 2.0, decr_ratio: float = 0.8,
    use_dynamic_loss_scaling: bool = True,
) -> OptimizerWithMixedPrecision:  # fmt: skip
    """optimizer, whose minimize runs the loss's Program in float16 where that is safe; see static.amp.decorate."""
    return amp.decorate(
        optimizer, amp_lists, init_loss_scaling=init_loss_scaling, incr_every_n_steps=incr_every_n_steps,
        decr_every_n_nan_or_inf=decr_every_n_nan_or_inf, incr_ratio=incr_ratio, decr_ratio=decr_ratio,
        use_dynamic_loss_scaling=use_dynamic_loss_scaling,
    )  # fmt: skip


__all__ = ["AutoMixedPrecisionLists", "decorate"]
