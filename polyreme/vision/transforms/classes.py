"""Transforms that are classes; random ones draw from Python's `random`, which DataLoader workers seed."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.errors import ConfigError, ShapeError
from polyreme.io.worker_info import get_worker_info
from polyreme.vision.image import as_pixels, is_tensor
from polyreme.vision.transforms import functional as F
from polyreme.vision.transforms.base import BaseTransform


class ToTensor(BaseTransform):
    """See to_tensor. In a DataLoader worker it gives an ndarray, of which the loader makes the Tensor."""

    def __init__(self, data_format: str = "CHW", keys: Sequence[str] | None = None) -> None:
        super().__init__(keys)
        self.data_format = data_format

    def _apply_image(self, img: Any) -> Any:
        if get_worker_info() is not None:
            return F.to_chw(img, self.data_format)
        return importlib.import_module("polyreme.vision.transforms.tensor").to_tensor(img, self.data_format)


class Normalize(BaseTransform):
    """See normalize; a number for mean or std holds for all channels."""

    mean: Any
    std: Any
    data_format: str
    to_rgb: bool

    def __init__(
        self,
        mean: Any = 0.0,
        std: Any = 1.0,
        data_format: str = "CHW",
        to_rgb: bool = False,
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__(keys)
        self.mean, self.std, self.data_format, self.to_rgb = mean, std, data_format, to_rgb

    def _apply_image(self, img: Any) -> Any:
        return F.normalize(img, self.mean, self.std, self.data_format, self.to_rgb)


class Transpose(BaseTransform):
    """The dims of [height, width, channels] in another order, as an ndarray; of a Tensor, its own dims, as a Tensor."""

    order: tuple[int, ...]

    def __init__(self, order: Sequence[int] = (2, 0, 1), keys: Sequence[str] | None = None) -> None:
        super().__init__(keys)
        if sorted(order) != [0, 1, 2]:
            raise ConfigError(f"Transpose: order={order!r}; give 0, 1 and 2 in some order")
        self.order = tuple(order)

    def _apply_image(self, img: Any) -> Any:
        return img.transpose(self.order) if is_tensor(img) else as_pixels(img, "Transpose").transpose(self.order)


class Resize(BaseTransform):
    """See resize."""

    size: int | Sequence[int]
    interpolation: str

    def __init__(
        self, size: int | Sequence[int], interpolation: str = "bilinear", keys: Sequence[str] | None = None
    ) -> None:
        super().__init__(keys)
        self.size, self.interpolation = size, interpolation

    def _apply_image(self, img: Any) -> Any:
        return F.resize(img, self.size, self.interpolation)


class ResizeNormalize(BaseTransform):
    """Resize, ToTensor and Normalize in one, with their bits; see resize_normalize. It gives an ndarray."""

    size: int | Sequence[int]
    options: tuple[Any, Any, str, str, bool]

    def __init__(
        self,
        size: int | Sequence[int],
        mean: Any = 0.0,
        std: Any = 1.0,
        interpolation: str = "bilinear",
        data_format: str = "CHW",
        to_rgb: bool = False,
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__(keys)
        self.size, self.options = size, (mean, std, interpolation, data_format, to_rgb)

    def _apply_image(self, img: Any) -> np.ndarray:
        return F.resize_normalize(img, self.size, *self.options)


class CenterCrop(BaseTransform):
    """See center_crop."""

    def __init__(self, size: int | Sequence[int], keys: Sequence[str] | None = None) -> None:
        super().__init__(keys)
        self.size = size

    def _apply_image(self, img: Any) -> Any:
        return F.center_crop(img, self.size)


class Pad(BaseTransform):
    """See pad."""

    padding: int | Sequence[int]
    fill: Any
    padding_mode: str

    def __init__(
        self,
        padding: int | Sequence[int],
        fill: Any = 0,
        padding_mode: str = "constant",
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__(keys)
        self.padding, self.fill, self.padding_mode = padding, fill, padding_mode

    def _apply_image(self, img: Any) -> Any:
        return F.pad(img, self.padding, self.fill, self.padding_mode)


class Grayscale(BaseTransform):
    """See to_grayscale."""

    def __init__(self, num_output_channels: int = 1, keys: Sequence[str] | None = None) -> None:
        super().__init__(keys)
        self.num_output_channels = num_output_channels

    def _apply_image(self, img: Any) -> Any:
        return F.to_grayscale(img, self.num_output_channels)


class _Flip(BaseTransform):
    def __init__(self, prob: float = 0.5, keys: Sequence[str] | None = None) -> None:
        super().__init__(keys)
        if not 0 <= prob <= 1:
            raise ConfigError(f"{type(self).__name__}: prob={prob}; give a probability, 0 .. 1")
        self.prob = prob

    def _get_params(self, inputs: tuple) -> bool:
        return random.random() < self.prob


class RandomHorizontalFlip(_Flip):
    """hflip with probability prob."""

    def _apply_image(self, img: Any) -> Any:
        return F.hflip(img) if self.params else img


class RandomVerticalFlip(_Flip):
    """vflip with probability prob."""

    def _apply_image(self, img: Any) -> Any:
        return F.vflip(img) if self.params else img


class RandomCrop(BaseTransform):
    """A part of the given size, anywhere in the image with equal probability.

    padding: added first, as pad does. pad_if_needed: an image that is smaller is padded to size on both sides; else it
    raises ShapeError.
    """

    size: tuple[int, int]
    padding: int | Sequence[int] | None
    pad_if_needed: bool
    fill: Any
    padding_mode: str

    def __init__(
        self,
        size: int | Sequence[int],
        padding: int | Sequence[int] | None = None,
        pad_if_needed: bool = False,
        fill: Any = 0,
        padding_mode: str = "constant",
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__(keys)
        self.size = F._pair("RandomCrop", size)
        self.padding, self.pad_if_needed, self.fill, self.padding_mode = padding, pad_if_needed, fill, padding_mode

    def _get_params(self, inputs: tuple) -> tuple[float, float]:
        return random.random(), random.random()

    def _apply_image(self, img: Any) -> Any:
        if self.padding is not None:
            img = F.pad(img, self.padding, self.fill, self.padding_mode)
        height, width = F.area(img)
        missing = [max(0, want - have) for want, have in zip(self.size, (height, width), strict=True)]
        if any(missing):
            if not self.pad_if_needed:
                raise ShapeError(
                    f"RandomCrop: {self.size} of an image of {(height, width)}; give padding or pad_if_needed"
                )
            img = F.pad(img, (missing[1], missing[0]), self.fill, self.padding_mode)
            height, width = F.area(img)
        # int, not round: each of the (room + 1) places is equally likely
        top, left = (
            int(draw * (have - want + 1))
            for draw, have, want in zip(self.params, (height, width), self.size, strict=True)
        )
        return F.crop(img, top, left, *self.size)


class RandomResizedCrop(BaseTransform):
    """A random part, of scale (low, high) of the area and ratio (low, high) of width to height, resized to size.

    Ten draws are tried; if none fits, the middle part of the nearest allowed ratio is taken (Szegedy et al., 2014).
    """

    size: tuple[int, int]
    scale: tuple[float, float]
    ratio: tuple[float, float]
    interpolation: str

    def __init__(
        self,
        size: int | Sequence[int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        interpolation: str = "bilinear",
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__(keys)
        self.size = F._pair("RandomResizedCrop", size)
        for name, (low, high) in (("scale", scale), ("ratio", ratio)):
            if not 0 < low <= high:
                raise ConfigError(f"RandomResizedCrop: {name}={(low, high)}; give (low, high) with 0 < low <= high")
        self.scale, self.ratio, self.interpolation = scale, ratio, interpolation

    def _get_params(self, inputs: tuple) -> list[tuple[float, float, float, float]]:
        return [(random.random(), random.random(), random.random(), random.random()) for _ in range(10)]

    def _apply_image(self, img: Any) -> Any:
        return F.resize(F.crop(img, *self._box(*F.area(img))), self.size, self.interpolation)

    def _box(self, height: int, width: int) -> tuple[int, int, int, int]:
        low, high = self.scale
        for area_draw, ratio_draw, top_draw, left_draw in self.params:
            area = height * width * (low + area_draw * (high - low))
            ratio = F.log_uniform(*self.ratio, ratio_draw)
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                return int(top_draw * (height - h + 1)), int(left_draw * (width - w + 1)), h, w
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        w, h = min(width, round(height * ratio)), min(height, round(width / ratio))
        return (height - h) // 2, (width - w) // 2, max(1, h), max(1, w)
