"""What stands where numbers are rounded: quanters, and observers, which measure before there is anything to round."""

from __future__ import annotations

from typing import Any

from polyreme.nn.layer import Layer


class BaseQuanter(Layer):
    """A Layer that rounds what passes, and says how: a class of one's own writes forward, scales, zero_points,
    quant_axis and bit_length."""

    def scales(self) -> Any:
        """The largest number that is not cut off: one, or one for each place along quant_axis, or [groups, out]."""
        raise NotImplementedError(f"{type(self).__name__} has no scales(); write one")

    def zero_points(self) -> Any:
        """The codes of 0; None for 0."""
        raise NotImplementedError(f"{type(self).__name__} has no zero_points(); write one")

    def quant_axis(self) -> int | None:
        """The dim that has scales of its own; -1 or None for one scale of all."""
        raise NotImplementedError(f"{type(self).__name__} has no quant_axis(); write one")

    def bit_length(self) -> int:
        """Bits of a number."""
        raise NotImplementedError(f"{type(self).__name__} has no bit_length(); write one")


class BaseObserver(BaseQuanter):
    """A quanter that changes nothing: it measures what passes; cal_thresholds then computes its scales."""

    def cal_thresholds(self) -> None:
        """Compute the scales of what passed."""
        raise NotImplementedError(f"{type(self).__name__} has no cal_thresholds(); write one")
