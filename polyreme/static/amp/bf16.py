"""polyreme.static.amp.bf16: mixed precision with bfloat16, which needs no loss scaling."""

from __future__ import annotations

from typing import Any

from polyreme.static.amp.decorator import CustomOpLists, OptimizerWithMixedPrecision, decorate
from polyreme.static.nn.checks import refuse

AutoMixedPrecisionListsBF16 = CustomOpLists


def decorate_bf16(
    optimizer: Any, amp_lists: CustomOpLists | None = None, use_pure_bf16: bool = False, use_bf16_guard: Any = None
) -> OptimizerWithMixedPrecision:
    """decorate(optimizer, dtype="bfloat16"), at level O2 if use_pure_bf16. Raises ConfigError for use_bf16_guard."""
    refuse("decorate_bf16", use_bf16_guard=(use_bf16_guard, "record that part in an amp.auto_cast block"))
    return decorate(optimizer, amp_lists, level="O2" if use_pure_bf16 else "O1", dtype="bfloat16")


__all__ = ["AutoMixedPrecisionListsBF16", "decorate_bf16"]
