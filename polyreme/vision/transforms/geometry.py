"""Images moved, turned, sheared, seen from the side, and with parts erased.

An image is a Pillow image, an ndarray [height, width(, channels)] or a Tensor [channels, height, width], which leaves
the tape. Positions are (x, y) from the upper left corner of the image, whose pixels have their centres at halves; all
classes of images take one way through NumPy, so they agree. Outside is `fill`: a number, or one a channel.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.errors import ConfigError, ShapeError, did_you_mean
from polyreme.vision.image import as_pixels, is_pillow, is_tensor, like

_TAPS = {"nearest": 1, "bilinear": 2, "bicubic": 4}


def affine(
    img: Any,
    angle: float,
    translate: Sequence[float],
    scale: float,
    shear: float | Sequence[float],
    interpolation: str = "nearest",
    fill: Any = 0,
    center: Sequence[float] | None = None,
) -> Any:
    """The image sheared, scaled and turned by angle degrees clockwise about center, then moved by translate pixels.

    shear: degrees along x, or (along x, along y). center: the middle unless given. interpolation: nearest, bilinear,
    bicubic. Raises ConfigError for a scale that is not positive and malformed settings.
    """
    pixels = as_pixels(img, "affine")
    shears = (shear, 0.0) if isinstance(shear, numbers.Real) else tuple(shear)  # type: ignore[arg-type]
    if len(translate) != 2 or len(shears) != 2 or not scale > 0:
        raise ConfigError(
            f"affine: translate={translate!r}, {scale=}, shear={shear!r}; give (x, y), a number above 0, and degrees"
        )
    turn, along_x, along_y = (math.radians(v) for v in (angle, *shears))
    cos, sin = math.cos(turn - along_y) / math.cos(along_y), math.sin(turn - along_y) / math.cos(along_y)
    forward = np.array(
        [
            [cos, -cos * math.tan(along_x) - math.sin(turn), 0],
            [sin, -sin * math.tan(along_x) + math.cos(turn), 0],
            [0, 0, 1 / scale],
        ]
    ) * np.array([[scale], [scale], [scale]])
    x, y = _middle(pixels) if center is None else center
    whole = _move(x + translate[0], y + translate[1]) @ forward @ _move(-x, -y)
    return like(_warp("affine", pixels, np.linalg.inv(whole), pixels.shape[:2], interpolation, fill), img)


def rotate(
    img: Any,
    angle: float,
    interpolation: str = "nearest",
    expand: bool = False,
    center: Sequence[float] | None = None,
    fill: Any = 0,
) -> Any:
    """The image turned by angle degrees counter-clockwise about center (the middle unless given).

    expand: the result is so large that it holds all of an image turned about its middle. interpolation: nearest,
    bilinear, bicubic.
    """
    pixels = as_pixels(img, "rotate")
    height, width = pixels.shape[:2]
    turn = math.radians(angle)
    # turns by right angles are then exact
    cos, sin = round(math.cos(turn), 15), round(math.sin(turn), 15)
    x, y = _middle(pixels) if center is None else center
    inverse = _move(x, y) @ np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1.0]]) @ _move(-x, -y)
    size = (height, width)
    if expand:
        corners = inverse @ np.array([[0, width, width, 0], [0, 0, height, height], [1, 1, 1, 1]])
        wide, high = (math.ceil(v.max()) - math.floor(v.min()) for v in corners[:2])
        if cos * sin == 0:  # a right angle needs no room for parts of pixels
            wide, high = (width, height) if sin == 0 else (height, width)
        inverse = inverse @ _move(-(wide - width) / 2, -(high - height) / 2)
        size = (high, wide)
    return like(_warp("rotate", pixels, inverse, size, interpolation, fill), img)


def perspective(
    img: Any,
    startpoints: Sequence[Sequence[float]],
    endpoints: Sequence[Sequence[float]],
    interpolation: str = "nearest",
    fill: Any = 0,
) -> Any:
    """The image seen so that its four startpoints come to lie at the endpoints.

    Both: (x, y) of top left, top right, bottom right, bottom left. interpolation: nearest, bilinear, bicubic. Raises
    ConfigError where no such view exists.
    """
    pixels = as_pixels(img, "perspective")
    start, end = np.asarray(startpoints, float), np.asarray(endpoints, float)
    if start.shape != (4, 2) or end.shape != (4, 2):
        raise ConfigError(f"perspective: startpoints={startpoints!r}, endpoints={endpoints!r}; give four (x, y) each")
    # start = (a x + b y + c, d x + e y + f) / (g x + h y + 1) at each end (x, y)
    zero, one = np.zeros((4, 3)), np.ones((4, 1))
    rows = [np.hstack([end, one, zero, -start[:, :1] * end]), np.hstack([zero, end, one, -start[:, 1:] * end])]
    try:
        found = np.linalg.solve(np.vstack(rows), np.concatenate([start[:, 0], start[:, 1]]))
    except np.linalg.LinAlgError as error:
        raise ConfigError(f"perspective: three of endpoints={endpoints!r} lie on a line; move one") from error
    inverse = np.append(found, 1.0).reshape(3, 3)
    return like(_warp("perspective", pixels, inverse, pixels.shape[:2], interpolation, fill), img)


def erase(img: Any, i: int, j: int, h: int, w: int, v: Any, inplace: bool = False) -> Any:
    """The image with v in the rectangle of h x w pixels at row i, column j.

    v: a number, or an array that broadcasts to the rectangle: [h, w, channels], of a Tensor [channels, h, w]. inplace
    changes img itself. Raises ShapeError for a rectangle that does not lie in the image.
    """
    height, width = img.shape[1:] if is_tensor(img) else as_pixels(img, "erase").shape[:2]
    if not (0 <= i <= height - h and 0 <= j <= width - w and h > 0 and w > 0):
        raise ShapeError(f"erase: {h} x {w} at ({i}, {j}) does not lie in an image of {height} x {width}")
    if is_tensor(img):
        out = img if inplace else img.clone()
        out[:, i : i + h, j : j + w] = v
        return out
    if is_pillow(img):
        part = as_pixels(img.crop((j, i, j + w, i + h)), "erase").copy()
        part[:] = v
        out = img if inplace else img.copy()
        out.paste(like(part, img), (j, i))
        return out
    out = img if inplace else img.copy()
    out[i : i + h, j : j + w] = v
    return out


def _middle(pixels: np.ndarray) -> tuple[float, float]:
    return pixels.shape[1] / 2, pixels.shape[0] / 2


def _move(x: float, y: float) -> np.ndarray:
    return np.array([[1, 0, x], [0, 1, y], [0, 0, 1.0]])


def _warp(
    who: str, pixels: np.ndarray, inverse: np.ndarray, size: tuple[int, ...], interpolation: str, fill: Any
) -> np.ndarray:
    """An image of size (height, width) whose pixel at (x, y, 1) is that of pixels at inverse @ (x, y, 1)."""
    if interpolation not in _TAPS:
        raise ConfigError(f"{who}: interpolation={interpolation!r}{did_you_mean(interpolation, _TAPS)}")
    outside = np.asarray(fill).reshape(-1)
    if outside.size not in (1, pixels.shape[2]):
        raise ShapeError(f"{who}: fill has {outside.size} numbers, the image {pixels.shape[2]} channels")
    ys, xs = np.mgrid[: size[0], : size[1]] + 0.5
    x, y, depth = np.tensordot(inverse, np.stack([xs, ys, np.ones_like(xs)]), 1)
    ahead = depth > 0
    x, y = x / np.where(ahead, depth, 1), y / np.where(ahead, depth, 1)
    inside = ahead & (x >= 0) & (x < pixels.shape[1]) & (y >= 0) & (y < pixels.shape[0])
    found = np.empty((*size, pixels.shape[2]), pixels.dtype)
    found[:] = outside
    found[inside] = _sample(pixels, x[inside], y[inside], _TAPS[interpolation])
    return found


def _sample(pixels: np.ndarray, x: np.ndarray, y: np.ndarray, taps: int) -> np.ndarray:
    """The image at places [n] inside it -> [n, channels], from taps x taps pixels; the edge is repeated."""
    if taps == 1:
        return pixels[y.astype(int), x.astype(int)]
    columns, across = _dim_taps(x, pixels.shape[1], taps)
    rows, down = _dim_taps(y, pixels.shape[0], taps)
    total: Any = 0
    for row, weight in zip(rows, down, strict=True):
        line = sum(w[:, None] * pixels[row, column] for column, w in zip(columns, across, strict=True))
        total = total + weight[:, None] * line
    if pixels.dtype.kind in "iu":
        limits = np.iinfo(pixels.dtype)
        total = np.clip(np.rint(total), limits.min, limits.max)
    return total.astype(pixels.dtype)


def _dim_taps(index: np.ndarray, size: int, taps: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Indices and weights of the pixels around places along one dim."""
    first = np.floor(index - 0.5).astype(int)
    far = [first + k for k in range(1 - taps // 2, taps // 2 + 1)]
    distance = [np.abs(index - 0.5 - k) for k in far]
    weights = [1 - d if taps == 2 else _cubic(d) for d in distance]
    return [np.clip(k, 0, size - 1) for k in far], weights


def _cubic(distance: np.ndarray, a: float = -0.75) -> np.ndarray:
    """Keys' cubic convolution kernel, 1981, equation 4, with the parameter that functional.interpolate has."""
    d = distance
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    return np.where(d <= 1, near, a * (((d - 5) * d + 8) * d - 4))
