"""Helpers of paddle.vision.transforms and paddle.vision.datasets.folder that projects derive their own from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.errors import DTypeError
from polyreme.vision.datasets.folder import IMAGES, load_rgb
from polyreme.vision.image import image_load, is_pillow, is_tensor

IMG_EXTENSIONS = IMAGES
pil_loader = load_rgb


def cv2_loader(path: str) -> Any:
    """An image file as an ndarray uint8 [height, width, (blue, green, red)]."""
    return image_load(path, "cv2")


def default_loader(path: str) -> Any:
    """An image file in the class that vision.set_image_backend chose."""
    return image_load(path)


def has_valid_extension(filename: str, extensions: Sequence[str]) -> bool:
    """Whether a file's name ends as one of extensions, in either case."""
    return filename.lower().endswith(tuple(extensions))


def _is_numpy_image(img: Any) -> bool:
    return isinstance(img, np.ndarray) and img.ndim in (2, 3)


def _get_image_size(img: Any) -> tuple[int, int]:
    """(width, height) of an image of any class."""
    if is_pillow(img):
        return img.size
    if is_tensor(img):
        return img.shape[-1], img.shape[-2]
    if isinstance(img, np.ndarray):
        return img.shape[1], img.shape[0]
    raise DTypeError(f"an image is a Pillow image, an ndarray or a Tensor, got {type(img).__name__}")
