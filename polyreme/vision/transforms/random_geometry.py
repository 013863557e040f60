"""Transforms that turn, move, distort and erase at random, by Python's `random`."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.errors import ConfigError
from polyreme.vision.image import as_pixels, is_tensor
from polyreme.vision.transforms import functional as F
from polyreme.vision.transforms import geometry
from polyreme.vision.transforms.base import BaseTransform


def _range(who: str, name: str, value: Any) -> tuple[float, float]:
    """(low, high) from a number v (-v .. v) or two."""
    if isinstance(value, (int, float)) and value >= 0:
        return -float(value), float(value)
    if isinstance(value, Sequence) and len(value) == 2 and value[0] <= value[1]:
        return float(value[0]), float(value[1])
    raise ConfigError(f"{who}: {name}={value!r}; give a number of at least 0, or (low, high)")


class RandomRotation(BaseTransform):
    """rotate by an angle drawn evenly from -degrees .. degrees, or from (low, high); the rest as for rotate."""

    degrees: tuple[float, float]
    interpolation: str
    expand: bool
    center: Sequence[float] | None
    fill: Any

    def __init__(
        self,
        degrees: float | Sequence[float],
        interpolation: str = "nearest",
        expand: bool = False,
        center: Sequence[float] | None = None,
        fill: Any = 0,
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__(keys)
        self.degrees = _range("RandomRotation", "degrees", degrees)
        self.interpolation, self.expand, self.center, self.fill = interpolation, expand, center, fill

    def _get_params(self, inputs: tuple) -> float:
        return random.uniform(*self.degrees)

    def _apply_image(self, img: Any) -> Any:
        return geometry.rotate(img, self.params, self.interpolation, self.expand, self.center, self.fill)


class RandomAffine(BaseTransform):
    """affine with settings drawn evenly.

    degrees: angles -degrees .. degrees, or (low, high). translate: (a, b), fractions of width and height to move by at
    most, to whole pixels. scale: (low, high). shear: degrees along x, -shear .. shear or (low, high), or (low, high of
    x, low, high of y).
    """

    degrees: tuple[float, float]
    shear: list[tuple[float, float]]
    translate: Sequence[float] | None
    scale: Sequence[float] | None
    interpolation: str
    fill: Any
    center: Sequence[float] | None

    def __init__(
        self,
        degrees: float | Sequence[float],
        translate: Sequence[float] | None = None,
        scale: Sequence[float] | None = None,
        shear: float | Sequence[float] | None = None,
        interpolation: str = "nearest",
        fill: Any = 0,
        center: Sequence[float] | None = None,
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__(keys)
        self.degrees = _range("RandomAffine", "degrees", degrees)
        if translate is not None and (len(translate) != 2 or not all(0 <= t <= 1 for t in translate)):
            raise ConfigError(f"RandomAffine: translate={translate!r}; give two fractions, 0 .. 1")
        if scale is not None and (len(scale) != 2 or not 0 < scale[0] <= scale[1]):
            raise ConfigError(f"RandomAffine: scale={scale!r}; give (low, high) with 0 < low <= high")
        four = isinstance(shear, Sequence) and len(shear) == 4
        pairs = [] if shear is None else [shear[:2], shear[2:]] if four else [shear]  # type: ignore[index]
        self.shear = [_range("RandomAffine", "shear", pair) for pair in pairs]
        self.translate, self.scale = translate, scale
        self.interpolation, self.fill, self.center = interpolation, fill, center

    def _get_params(self, inputs: tuple) -> tuple[float, list[float], float, list[float]]:
        shears = [random.uniform(*pair) for pair in self.shear]
        moves = [random.uniform(-t, t) for t in self.translate or (0, 0)]
        return random.uniform(*self.degrees), moves, random.uniform(*(self.scale or (1, 1))), [*shears, 0.0, 0.0][:2]

    def _apply_image(self, img: Any) -> Any:
        angle, moves, scale, shear = self.params
        height, width = F.area(img)
        translate = [round(moves[0] * width), round(moves[1] * height)]
        return geometry.affine(img, angle, translate, scale, shear, self.interpolation, self.fill, self.center)


class RandomPerspective(BaseTransform):
    """perspective with probability prob, each corner moved inwards by up to distortion_scale of half the sides."""

    prob: float
    distortion_scale: float
    interpolation: str
    fill: Any

    def __init__(
        self,
        prob: float = 0.5,
        distortion_scale: float = 0.5,
        interpolation: str = "nearest",
        fill: Any = 0,
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__(keys)
        if not 0 <= prob <= 1 or not 0 <= distortion_scale <= 1:
            raise ConfigError(f"RandomPerspective: {prob=}, {distortion_scale=}; give both in 0 .. 1")
        self.prob, self.distortion_scale = prob, distortion_scale
        self.interpolation, self.fill = interpolation, fill

    def _get_params(self, inputs: tuple) -> list[tuple[float, float]] | None:
        draws = [(random.random(), random.random()) for _ in range(4)]
        return draws if random.random() < self.prob else None

    def _apply_image(self, img: Any) -> Any:
        if self.params is None:
            return img
        height, width = F.area(img)
        start = [[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]]
        # whole pixels, each as likely; the sign points inwards
        most = [int(self.distortion_scale * (side // 2)) for side in (width, height)]
        end = [
            [
                at + (1 if at == 0 else -1) * int(draw * (far + 1))
                for at, draw, far in zip(corner, draws, most, strict=True)
            ]
            for corner, draws in zip(start, self.params, strict=True)
        ]
        return geometry.perspective(img, start, end, self.interpolation, self.fill)


class RandomErasing(BaseTransform):
    """erase, with probability prob, a rectangle of scale (low, high) of the area and ratio (low, high) height to width.

    value: a number, one a channel, or "random": each pixel drawn by itself, of bytes evenly from 0 .. 255, of floats
    from the normal distribution. Ten rectangles are tried; if none fits, nothing is erased. inplace changes the image
    itself. Source: Zhong et al., 2017, arXiv:1708.04896.
    """

    prob: float
    scale: Sequence[float]
    ratio: Sequence[float]
    inplace: bool

    def __init__(
        self,
        prob: float = 0.5,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: float | Sequence[float] | str = 0,
        inplace: bool = False,
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__(keys)
        if not 0 <= prob <= 1:
            raise ConfigError(f"RandomErasing: {prob=}; give a probability, 0 .. 1")
        for name, pair, most in (("scale", scale, 1.0), ("ratio", ratio, math.inf)):
            if len(pair) != 2 or not 0 < pair[0] <= pair[1] <= most:
                raise ConfigError(f"RandomErasing: {name}={pair!r}; give (low, high), 0 < low <= high <= {most}")
        if isinstance(value, str) and value != "random":
            raise ConfigError(f"RandomErasing: value={value!r}; give a number, one a channel, or 'random'")
        self.prob, self.scale, self.ratio, self.value, self.inplace = prob, scale, ratio, value, inplace

    def _get_params(self, inputs: tuple) -> Any:
        if random.random() >= self.prob:
            return None
        return [[random.random() for _ in range(4)] for _ in range(10)], random.getrandbits(64)

    def _apply_image(self, img: Any) -> Any:
        if self.params is None:
            return img
        draws, seed = self.params
        height, width = F.area(img)
        for size, shape, top, left in draws:
            area = height * width * (self.scale[0] + size * (self.scale[1] - self.scale[0]))
            ratio = F.log_uniform(self.ratio[0], self.ratio[1], shape)
            h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < h <= height and 0 < w <= width:
                i, j = int(top * (height - h + 1)), int(left * (width - w + 1))
                return geometry.erase(img, i, j, h, w, self._values(img, h, w, seed), self.inplace)
        return img

    def _values(self, img: Any, h: int, w: int, seed: int) -> Any:
        pixels = as_pixels(img, "RandomErasing")
        if self.value == "random":
            rng, shape = np.random.default_rng(seed), (h, w, pixels.shape[2])
            values = rng.integers(0, 256, shape) if pixels.dtype == np.uint8 else rng.standard_normal(shape)
            values = values.astype(pixels.dtype)
        else:
            values = np.asarray(self.value, pixels.dtype)
        if is_tensor(img) and values.ndim:
            return values.transpose(2, 0, 1) if values.ndim == 3 else values[:, None, None]
        flat = isinstance(img, np.ndarray) and img.ndim == 2
        return values[:, :, 0] if flat and values.ndim == 3 else values
