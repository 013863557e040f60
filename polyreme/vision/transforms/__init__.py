"""Transforms of images, as classes to compose and as functions. to_tensor loads jax when it is first used."""

import importlib
from typing import Any

from polyreme.vision.transforms.base import BaseTransform, Compose
from polyreme.vision.transforms.classes import (
    CenterCrop,
    Grayscale,
    Normalize,
    Pad,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    ToTensor,
    Transpose,
)
from polyreme.vision.transforms.functional import (
    center_crop,
    crop,
    hflip,
    normalize,
    pad,
    resize,
    to_grayscale,
    vflip,
)

__all__ = [
    "BaseTransform",
    "CenterCrop",
    "Compose",
    "Grayscale",
    "Normalize",
    "Pad",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomVerticalFlip",
    "Resize",
    "ToTensor",
    "Transpose",
    "center_crop",
    "crop",
    "hflip",
    "normalize",
    "pad",
    "resize",
    "to_grayscale",
    "to_tensor",  # pyright: ignore[reportUnsupportedDunderAll]  (loads late)
    "vflip",
]


def __getattr__(name: str) -> Any:
    if name != "to_tensor":
        raise AttributeError(f"module 'polyreme.vision.transforms' has no attribute {name!r}")
    return importlib.import_module("polyreme.vision.transforms.tensor").to_tensor
