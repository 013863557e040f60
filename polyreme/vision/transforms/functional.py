"""Image functions on Pillow images, ndarrays [height, width(, channels)] and Tensors [channels, height, width].

The class stays the same; Tensors leave the tape.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.errors import ConfigError, DTypeError, ShapeError, did_you_mean
from polyreme.vision.image import as_pixels, is_pillow, is_tensor, like, pillow

_RESAMPLING = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}  # Pillow's numbers
_PAD_MODES = {"constant": "constant", "edge": "edge", "reflect": "reflect", "symmetric": "symmetric"}
# ITU-R 601-2: the luma of red, green and blue, as Pillow's convert("L") weighs them
_LUMA = np.array([299, 587, 114]) / 1000
# the same in units of 2^-16, as Pillow computes it for bytes
_LUMA_16 = np.array([19595, 38470, 7471])


def to_chw(pic: Any, data_format: str = "CHW") -> np.ndarray:
    """Pixels as [channels, height, width] (or "HWC"): bytes become 0 .. 1 and floats keep their values, as float32.

    Signed integers, such as the classes of a mask, stay what they are.
    """
    if data_format not in ("CHW", "HWC"):
        raise ConfigError(f"to_tensor: data_format={data_format!r}; give 'CHW' or 'HWC'")
    pixels = as_pixels(pic, "to_tensor")
    if pixels.dtype == np.uint8:
        pixels = pixels.astype(np.float32) / np.float32(255)
    elif pixels.dtype == bool or pixels.dtype.kind == "f" or is_pillow(pic):
        pixels = pixels.astype(np.float32)
    elif pixels.dtype.kind != "i":
        raise DTypeError(
            f"to_tensor: the image is {pixels.dtype.name}; give uint8 (0 .. 255), floats or signed integers"
        )
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)) if data_format == "CHW" else pixels


def normalize(img: Any, mean: Any, std: Any, data_format: str = "CHW", to_rgb: bool = False) -> Any:
    """(img - mean) / std by channel, float32; a Tensor stays one (off the tape). to_rgb reverses the channels.

    Raises ShapeError if the numbers of channels differ, ConfigError for a std of 0.

    >>> normalize(np.ones((1, 1, 2), "float32"), 0.5, 0.25)
    array([[[2., 2.]]], dtype=float32)
    """
    if data_format not in ("CHW", "HWC"):
        raise ConfigError(f"normalize: data_format={data_format!r}; give 'CHW' or 'HWC'")
    if is_tensor(img):
        return type(img)(normalize(img.numpy(), mean, std, data_format, to_rgb))
    array = np.asarray(img, np.float32)
    if array.ndim != 3:
        raise ShapeError(f"normalize: the image has shape {list(array.shape)}; give three dims, {data_format}")
    axis = 0 if data_format == "CHW" else 2
    if to_rgb:
        array = np.flip(array, axis)
    shape = [1, 1, 1]
    shape[axis] = -1
    center, scale = (np.asarray(v, np.float32).reshape(-1) for v in (mean, std))
    for name, value in (("mean", center), ("std", scale)):
        if value.size not in (1, array.shape[axis]):
            raise ShapeError(f"normalize: {name} has {value.size} numbers, the image {array.shape[axis]} channels")
    if not scale.all():
        raise ConfigError(f"normalize: std={std!r} has a 0; give numbers above it")
    return (array - center.reshape(shape)) / scale.reshape(shape)


def resize(img: Any, size: int | Sequence[int], interpolation: str = "bilinear") -> Any:
    """To size (height, width), or so that the shorter side is size, keeping the ratio.

    interpolation: nearest, bilinear, bicubic, box, lanczos or hamming, as Pillow does them (smaller images are averaged
    over the area, except by nearest).
    """
    if interpolation not in _RESAMPLING:
        raise ConfigError(f"resize: interpolation={interpolation!r}{did_you_mean(interpolation, _RESAMPLING)}")
    method = _RESAMPLING[interpolation]
    pixels = as_pixels(img, "resize")
    height, width = _target(pixels.shape[0], pixels.shape[1], size)
    if is_pillow(img):
        return img.resize((width, height), method)
    if pixels.dtype == np.uint8:
        kind = pixels.dtype
    elif pixels.dtype.kind == "f":
        kind = np.dtype(np.float32)
    else:
        raise DTypeError(f"resize: the image is {pixels.dtype.name}; give uint8 or floats")
    planes = [
        pillow().fromarray(np.ascontiguousarray(pixels[:, :, c], kind)).resize((width, height), method)
        for c in range(pixels.shape[2])
    ]
    return like(np.stack([np.asarray(p) for p in planes], -1).astype(pixels.dtype), img)


def resize_normalize(
    img: Any,
    size: int | Sequence[int],
    mean: Any,
    std: Any,
    interpolation: str = "bilinear",
    data_format: str = "CHW",
    to_rgb: bool = False,
) -> np.ndarray:
    """normalize(to_chw(resize(img, size)), mean, std) of an image, float32 [channels, height, width] (or "HWC").

    The same bits as those three calls, in one pass over the resized bytes: what each of the 256 values becomes is
    computed once a channel, in the same float32 operations, and looked up. Images of floats take the three calls.
    Raises what they raise.

    >>> image = np.full((4, 4, 3), 255, "uint8")
    >>> resize_normalize(image, 2, mean=0.5, std=0.25)[:, 0, 0]
    array([2., 2., 2.], dtype=float32)
    """
    if data_format not in ("CHW", "HWC"):
        raise ConfigError(f"resize_normalize: data_format={data_format!r}; give 'CHW' or 'HWC'")
    pixels = as_pixels(img, "resize_normalize")
    if pixels.dtype != np.uint8:
        return normalize(to_chw(resize(img, size, interpolation), data_format), mean, std, data_format, to_rgb)
    if isinstance(img, np.ndarray):  # three channels are resized at once
        img = pillow().fromarray(np.ascontiguousarray(pixels)) if pixels.shape[2] == 3 else img
    pixels = as_pixels(resize(img, size, interpolation), "resize_normalize")
    channels = pixels.shape[2]
    levels = np.broadcast_to((np.arange(256, dtype=np.uint8))[:, None, None], (256, 1, channels))
    table = normalize(to_chw(levels), mean, std)[:, :, 0]
    if to_rgb:
        pixels = pixels[:, :, ::-1]
    planes = np.empty((channels, *pixels.shape[:2]), np.float32)
    for channel in range(channels):
        # clip: bytes are always among the 256, which need no check
        np.take(table[channel], pixels[:, :, channel], out=planes[channel], mode="clip")
    return planes if data_format == "CHW" else np.ascontiguousarray(planes.transpose(1, 2, 0))


def _target(height: int, width: int, size: Any) -> tuple[int, int]:
    if isinstance(size, numbers.Integral):
        short = int(size)
        _check_sizes("resize", short)
        if height <= width:
            return short, max(1, int(short * width / height))
        return max(1, int(short * height / width)), short
    return _pair("resize", size)


def crop(img: Any, top: int, left: int, height: int, width: int) -> Any:
    """The part of [height, width] whose upper left pixel is (top, left). Raises ShapeError unless it lies inside."""
    pixels = as_pixels(img, "crop")
    inside = 0 <= top <= pixels.shape[0] - height and 0 <= left <= pixels.shape[1] - width
    if not inside or height < 1 or width < 1:
        raise ShapeError(
            f"crop: {height} x {width} at ({top}, {left}) does not lie in an image of "
            f"{pixels.shape[0]} x {pixels.shape[1]}; make it smaller, or pad first"
        )
    if is_pillow(img):
        return img.crop((left, top, left + width, top + height))
    return like(pixels[top : top + height, left : left + width], img)


def center_crop(img: Any, output_size: int | Sequence[int]) -> Any:
    """The middle part of output_size: a side, or (height, width). Raises ShapeError for an image that is smaller."""
    height, width = _pair("center_crop", output_size)
    pixels = as_pixels(img, "center_crop")
    top, left = (round((have - want) / 2) for have, want in zip(pixels.shape, (height, width), strict=False))
    return crop(img, top, left, height, width)


def hflip(img: Any) -> Any:
    """Left and right exchanged."""
    return like(as_pixels(img, "hflip")[:, ::-1], img)


def vflip(img: Any) -> Any:
    """Top and bottom exchanged."""
    return like(as_pixels(img, "vflip")[::-1], img)


def pad(img: Any, padding: int | Sequence[int], fill: Any = 0, padding_mode: str = "constant") -> Any:
    """Pixels added around: padding on all sides, or (left and right, top and bottom), or (left, top, right, bottom).

    padding_mode: constant (of fill: a number, or one a channel), edge, reflect or symmetric.
    """
    if padding_mode not in _PAD_MODES:
        raise ConfigError(f"pad: padding_mode={padding_mode!r}{did_you_mean(padding_mode, _PAD_MODES)}")
    left, top, right, bottom = _four(padding)
    pixels = as_pixels(img, "pad")
    around = ((top, bottom), (left, right), (0, 0))
    if padding_mode != "constant":
        return like(np.pad(pixels, around, padding_mode), img)  # type: ignore[call-overload]
    value = np.asarray(fill).reshape(-1)
    if value.size not in (1, pixels.shape[2]):
        raise ShapeError(f"pad: fill has {value.size} numbers, the image {pixels.shape[2]} channels")
    out = np.empty((pixels.shape[0] + top + bottom, pixels.shape[1] + left + right, pixels.shape[2]), pixels.dtype)
    out[:] = value
    out[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
    return like(out, img)


def to_grayscale(img: Any, num_output_channels: int = 1) -> Any:
    """Grey by luma (0.299 red + 0.587 green + 0.114 blue), in 1 channel or 3 equal ones."""
    if num_output_channels not in (1, 3):
        raise ConfigError(f"to_grayscale: num_output_channels={num_output_channels!r}; give 1 or 3")
    if is_pillow(img):
        grey = img.convert("L")
        return grey if num_output_channels == 1 else pillow().merge("RGB", (grey, grey, grey))
    pixels = as_pixels(img, "to_grayscale")
    if pixels.shape[2] not in (1, 3):
        raise ShapeError(f"to_grayscale: the image has {pixels.shape[2]} channels; give 1 or 3")
    grey = np.repeat(luma(pixels), num_output_channels, axis=2)
    return like(grey, img) if is_tensor(img) else grey


def luma(pixels: np.ndarray) -> np.ndarray:
    """The grey of pixels [height, width, 1 or 3] as [height, width, 1], of the same dtype."""
    if pixels.shape[2] == 1:
        return pixels
    if pixels.dtype == np.uint8:
        return ((pixels.astype(np.int64) @ _LUMA_16 + 2**15) >> 16)[:, :, None].astype(np.uint8)
    return (pixels @ _LUMA)[:, :, None].astype(pixels.dtype)


def _pair(who: str, size: Any) -> tuple[int, int]:
    both = (size, size) if isinstance(size, numbers.Integral) else tuple(size)
    if len(both) != 2:
        raise ConfigError(f"{who}: size={size!r}; give one number, or (height, width)")
    _check_sizes(who, *both)
    return int(both[0]), int(both[1])


def _check_sizes(who: str, *sizes: Any) -> None:
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 1:
            raise ConfigError(f"{who}: a size is {size!r}; give whole numbers of at least 1")


def _four(padding: Any) -> tuple[int, int, int, int]:
    sides: tuple[Any, ...] = (padding,) if isinstance(padding, numbers.Number) else tuple(padding)
    if len(sides) not in (1, 2, 4) or not all(isinstance(s, (int, np.integer)) and s >= 0 for s in sides):
        raise ConfigError(f"pad: padding={padding!r}; give 1, 2 or 4 whole numbers of at least 0")
    full = sides * (4 // len(sides))
    return full[0], full[1], full[2], full[3]


def area(img: Any) -> tuple[int, int]:
    """(height, width)."""
    pixels = as_pixels(img, "transform")
    return pixels.shape[0], pixels.shape[1]


def log_uniform(low: float, high: float, draw: float) -> float:
    """The number between low and high whose logarithm is draw (0 .. 1) of the way."""
    return math.exp(math.log(low) + draw * (math.log(high) - math.log(low)))
