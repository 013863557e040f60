"""Brightness, contrast, saturation and hue of images.

An image is a Pillow image (grey or RGB), an ndarray [height, width(, channels)] or a Tensor [channels, height, width],
which leaves the tape; bytes are 0 .. 255, floats 0 .. 1. All of them take one way through NumPy, so they agree.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from polyreme.errors import ConfigError, DataError, DTypeError, ShapeError
from polyreme.vision.image import as_pixels, is_pillow, like
from polyreme.vision.transforms.functional import luma


def adjust_brightness(img: Any, brightness_factor: float) -> Any:
    """Each channel times brightness_factor (at least 0; 1 changes nothing, 0 gives black), cut to its range.

    >>> adjust_brightness(np.full((1, 1), 100, "uint8"), 1.5)
    array([[150]], dtype=uint8)
    """
    return _towards(img, "brightness", brightness_factor, lambda pixels: 0)


def adjust_contrast(img: Any, contrast_factor: float) -> Any:
    """Away from the image's mean grey by contrast_factor (at least 0; 0 gives the mean alone), cut to its range."""

    def mean(pixels: np.ndarray) -> Any:
        value = luma(pixels).mean(dtype=np.float64)
        # as Pillow does: a grey that an image of bytes can have
        return int(value + 0.5) if pixels.dtype == np.uint8 else value

    return _towards(img, "contrast", contrast_factor, mean)


def adjust_saturation(img: Any, saturation_factor: float) -> Any:
    """Away from the grey of each pixel by saturation_factor (at least 0; 0 gives greys), cut to its range."""
    return _towards(img, "saturation", saturation_factor, luma)


def adjust_hue(img: Any, hue_factor: float) -> Any:
    """Colours turned by hue_factor of the circle (-0.5 .. 0.5), in hue, saturation and value; a grey image stays.

    Raises ConfigError for a hue_factor outside.
    """
    if not -0.5 <= hue_factor <= 0.5:
        raise ConfigError(f"adjust_hue: hue_factor={hue_factor}; give -0.5 to 0.5")
    pixels, limit = _check(img, "adjust_hue")
    if pixels.shape[2] == 1:
        return img
    turned = _rotate(pixels.astype(np.float64) / limit, hue_factor) * limit
    return like((np.rint(turned) if limit == 255 else turned).astype(pixels.dtype), img)


def _check(img: Any, who: str) -> tuple[np.ndarray, int]:
    """(pixels, the largest value one can have)."""
    pixels = as_pixels(img, who)
    if (is_pillow(img) and img.mode not in ("L", "RGB")) or pixels.shape[2] not in (1, 3):
        mode = f"mode {img.mode}" if is_pillow(img) else f"{pixels.shape[2]} channels"
        raise ShapeError(f"{who}: the image has {mode}; give a grey or RGB image (Pillow's convert makes one)")
    if pixels.dtype == np.uint8:
        return pixels, 255
    if pixels.dtype.kind != "f":
        raise DTypeError(f"{who}: the image is {pixels.dtype.name}; give uint8 (0 .. 255) or floats (0 .. 1)")
    low, high = pixels.min(initial=0), pixels.max(initial=1)
    # interpolation overshoots a little; pixels of 0 .. 255 or normalized ones would be cut to nonsense
    if low < -0.1 or high > 1.1:
        raise DataError(f"{who}: a float image of {low} .. {high}; give 0 .. 1, or uint8")
    return pixels, 1


def _towards(img: Any, name: str, factor: float, base: Any) -> Any:
    """base(pixels) + factor * (pixels - base(pixels)), cut to the range; bytes are rounded down, as by Pillow."""
    if not factor >= 0:
        raise ConfigError(f"adjust_{name}: {name}_factor={factor}; give a number of at least 0")
    pixels, limit = _check(img, f"adjust_{name}")
    wide = np.promote_types(pixels.dtype, np.float32)
    start = np.asarray(base(pixels), wide)
    moved = start + wide.type(factor) * (pixels.astype(wide) - start)
    return like(np.clip(moved, 0, limit).astype(pixels.dtype), img)


def _rotate(rgb: np.ndarray, turn: float) -> np.ndarray:
    """RGB 0 .. 1 with the hue of each pixel moved by turn (1: once around): Smith, 1978, the hexcone model."""
    largest, smallest = rgb.max(-1), rgb.min(-1)
    spread = largest - smallest
    safe = np.where(spread > 0, spread, 1)
    red, green, blue = (rgb[..., c] for c in range(3))
    sixth = np.where(
        largest == red,
        (green - blue) / safe,
        np.where(largest == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    sixth = (sixth + 6 * turn) % 6
    # each channel is a trapezoid of the hue: 0 at its complement, 1 around its own
    offsets = np.array([5, 3, 1])
    at = (offsets + sixth[..., None]) % 6
    return largest[..., None] - spread[..., None] * np.clip(np.minimum(at, 4 - at), 0, 1)
