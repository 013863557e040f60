"""Images: which class stands for one, and loading them. The only file that imports Pillow, which is optional."""

from __future__ import annotations

import os
import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np

from polyreme.errors import ConfigError, DataError, DTypeError, ShapeError

try:
    from PIL import Image, ImageOps
except ImportError:
    Image = ImageOps = None  # type: ignore[assignment]

# Pillow warns at 89 million pixels and refuses at twice that; a picture to learn from is far below either
MAX_PIXELS = 89_478_485
# what Pillow's readers raise for a damaged or hostile file, each format its own
_DAMAGED = (OSError, SyntaxError, ValueError, TypeError, LookupError, OverflowError, EOFError, struct.error, zlib.error)
_BACKENDS = ("pil", "cv2")


class _Backend:
    """The image class in force."""

    __slots__ = ("name",)

    def __init__(self) -> None:
        self.name = "pil"


_backend = _Backend()


def set_image_backend(backend: str) -> None:
    """What datasets give images as: "pil" (Pillow images) or "cv2" (ndarrays; OpenCV itself is not needed)."""
    _backend.name = check_backend(backend)


def get_image_backend() -> str:
    """The image class in force, "pil" at the start."""
    return _backend.name


def check_backend(backend: str | None) -> str:
    """The backend asked for, the one in force for None. Raises ConfigError for a name that is not known."""
    if backend is None:
        return _backend.name
    if backend not in _BACKENDS:
        raise ConfigError(f"image backend {backend!r}; give 'pil' or 'cv2'")
    return backend


def image_load(path: str | os.PathLike[str], backend: str | None = None) -> Any:
    """An image file as a Pillow image, or with backend "cv2" as an ndarray uint8 [height, width, (blue, green, red)].

    Raises DataError for a file that is no image or has more than MAX_PIXELS pixels.
    """
    chosen = check_backend(backend)
    image = _open(path, str(path), None)
    if chosen == "pil":
        return image
    return np.asarray(image.convert("RGB"))[:, :, ::-1]


def decoded(raw: bytes, *formats: str, most_pixels: int | None = None) -> Any:
    """The Pillow image in the bytes of a file of one of these formats, such as "JPEG", of at most so many pixels.
    Raises DataError as image_load does."""
    return _open(BytesIO(raw), f"{len(raw)} bytes", list(formats), most_pixels)


def _open(source: Any, shown: str, formats: list[str] | None, most_pixels: int | None = None) -> Any:
    library, most = pillow(), MAX_PIXELS if most_pixels is None else most_pixels
    try:
        with library.open(source, formats=formats) as image:
            if image.width * image.height > most:
                raise DataError(
                    f"{shown}: {image.width} x {image.height} pixels; at most {most} are read, scale it down"
                )
            image.load()
    # Pillow refuses by itself what has twice its own limit, and warns before
    except (library.DecompressionBombError, library.DecompressionBombWarning) as error:
        raise DataError(f"{shown}: more pixels than the {MAX_PIXELS} that are read; scale it down") from error
    except _DAMAGED as error:
        raise DataError(f"{shown}: cannot be read as an image: {error}") from error
    return image


def pillow() -> Any:
    """Pillow's Image module. Raises ConfigError where Pillow is missing."""
    if Image is None:
        raise ConfigError("this needs Pillow, which is not installed; pip install 'polyreme[vision]'")
    return Image


def upright(image: Any) -> Any:
    """A Pillow image turned as its file says that it is to be looked at."""
    return ImageOps.exif_transpose(image)


def is_pillow(image: Any) -> bool:
    """Whether this is a Pillow image."""
    return Image is not None and isinstance(image, Image.Image)


def is_tensor(image: Any) -> bool:
    """Whether this is a Tensor; told without loading jax."""
    return not isinstance(image, np.ndarray) and hasattr(image, "numpy")


def as_pixels(image: Any, who: str) -> np.ndarray:
    """An image as an ndarray, [height, width, channels], uint8 if it was a Pillow image of bytes.

    It is a Pillow image, an ndarray [height, width(, channels)] or a Tensor [channels, height, width], which is
    read, so not inside a capture. Raises DTypeError for another class, ShapeError for other numbers of dims.
    """
    if is_tensor(image):
        if len(image.shape) != 3:
            raise ShapeError(f"{who}: the image has shape {list(image.shape)}; give a Tensor [channels, height, width]")
        return image.numpy().transpose(1, 2, 0)
    if not is_pillow(image) and not isinstance(image, np.ndarray):
        raise DTypeError(f"{who}: the image is a {type(image).__name__}; give a Pillow image, an ndarray or a Tensor")
    array = np.asarray(image)
    if array.ndim == 2:
        return array[:, :, None]
    if array.ndim != 3:
        raise ShapeError(f"{who}: the image has shape {list(array.shape)}; give [height, width(, channels)]")
    return array


def like(pixels: np.ndarray, image: Any) -> Any:
    """Pixels [height, width, channels] as the class (and, for an ndarray, the number of dims) that image has."""
    if is_tensor(image):
        return type(image)(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
    if is_pillow(image):
        flat = pixels[:, :, 0] if pixels.shape[2] == 1 else pixels
        return pillow().fromarray(np.ascontiguousarray(flat))
    return pixels[:, :, 0] if image.ndim == 2 else pixels
