"""Transforms that change colours at random, by Python's `random`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from polyreme.errors import ConfigError
from polyreme.vision.transforms import color
from polyreme.vision.transforms.base import BaseTransform

Range = tuple[float, float]


class _Jitter(BaseTransform):
    """adjust by a factor drawn evenly from a range about the factor that changes nothing."""

    adjust: ClassVar[Callable[..., Any]]
    still: ClassVar[float] = 1.0
    bounds: ClassVar[Range] = (0.0, float("inf"))

    def __init__(self, value: float | Sequence[float], keys: Sequence[str] | None = None) -> None:
        super().__init__(keys)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
            low, high = max(self.bounds[0], self.still - value), self.still + value
        elif isinstance(value, Sequence) and len(value) == 2:
            low, high = value
        else:
            raise ConfigError(f"{type(self).__name__}: value={value!r}; give a number of at least 0, or (low, high)")
        if not self.bounds[0] <= low <= high <= self.bounds[1]:
            raise ConfigError(
                f"{type(self).__name__}: value={value!r} makes factors {low} .. {high}; they must lie in "
                f"{self.bounds[0]} .. {self.bounds[1]}"
            )
        self.value, self.range = value, (float(low), float(high))

    def _get_params(self, inputs: tuple) -> float:
        return random.uniform(*self.range)

    def _apply_image(self, img: Any) -> Any:
        return img if self.params == self.still else self.adjust(img, self.params)


class BrightnessTransform(_Jitter):
    """adjust_brightness by a factor from max(0, 1 - value) .. 1 + value, or (low, high) itself."""

    adjust = staticmethod(color.adjust_brightness)


class ContrastTransform(_Jitter):
    """adjust_contrast by a factor from max(0, 1 - value) .. 1 + value, or (low, high) itself."""

    adjust = staticmethod(color.adjust_contrast)


class SaturationTransform(_Jitter):
    """Saturation times a factor from max(0, 1 - value) .. 1 + value, or (low, high) itself."""

    adjust = staticmethod(color.adjust_saturation)


class HueTransform(_Jitter):
    """adjust_hue by a factor from -value .. value (at most 0.5), or (low, high) itself."""

    adjust = staticmethod(color.adjust_hue)
    still: ClassVar[float] = 0.0
    bounds: ClassVar[Range] = (-0.5, 0.5)


class ColorJitter(BaseTransform):
    """BrightnessTransform, ContrastTransform, SaturationTransform and HueTransform, in random order.

    brightness, contrast, saturation, hue: the value of each.
    """

    brightness: float | Sequence[float]
    contrast: float | Sequence[float]
    saturation: float | Sequence[float]
    hue: float | Sequence[float]

    def __init__(
        self,
        brightness: float | Sequence[float] = 0,
        contrast: float | Sequence[float] = 0,
        saturation: float | Sequence[float] = 0,
        hue: float | Sequence[float] = 0,
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__(keys)
        self.brightness, self.contrast, self.saturation, self.hue = brightness, contrast, saturation, hue
        self.parts: list[_Jitter] = [
            BrightnessTransform(brightness), ContrastTransform(contrast), SaturationTransform(saturation),
            HueTransform(hue),
        ]  # fmt: skip

    def _get_params(self, inputs: tuple) -> list[_Jitter]:
        for part in self.parts:
            part.params = part._get_params(inputs)
        return random.sample(self.parts, len(self.parts))

    def _apply_image(self, img: Any) -> Any:
        for part in self.params:
            img = part._apply_image(img)
        return img
