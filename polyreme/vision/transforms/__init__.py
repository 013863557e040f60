"""Transforms of images, as classes to compose and as functions. to_tensor loads jax when it is first used."""

import importlib
from typing import Any

from polyreme.errors import nearest
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
    ResizeNormalize,
    ToTensor,
    Transpose,
)
from polyreme.vision.transforms.color import adjust_brightness, adjust_contrast, adjust_hue
from polyreme.vision.transforms.functional import (
    center_crop,
    crop,
    hflip,
    normalize,
    pad,
    resize,
    resize_normalize,
    to_grayscale,
    vflip,
)
from polyreme.vision.transforms.geometry import affine, erase, perspective, rotate
from polyreme.vision.transforms.random_color import (
    BrightnessTransform,
    ColorJitter,
    ContrastTransform,
    HueTransform,
    SaturationTransform,
)
from polyreme.vision.transforms.random_geometry import RandomAffine, RandomErasing, RandomPerspective, RandomRotation

__all__ = [
    "BaseTransform",
    "BrightnessTransform",
    "CenterCrop",
    "ColorJitter",
    "Compose",
    "ContrastTransform",
    "Grayscale",
    "HueTransform",
    "Normalize",
    "Pad",
    "RandomAffine",
    "RandomCrop",
    "RandomErasing",
    "RandomHorizontalFlip",
    "RandomPerspective",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomVerticalFlip",
    "Resize",
    "ResizeNormalize",
    "SaturationTransform",
    "ToTensor",
    "Transpose",
    "adjust_brightness",
    "adjust_contrast",
    "adjust_hue",
    "affine",
    "center_crop",
    "crop",
    "erase",
    "hflip",
    "normalize",
    "pad",
    "perspective",
    "resize",
    "resize_normalize",
    "rotate",
    "to_grayscale",
    "to_tensor",  # pyright: ignore[reportUnsupportedDunderAll]  (loads late)
    "vflip",
]


def __getattr__(name: str) -> Any:
    if name != "to_tensor":
        raise AttributeError(f"module 'polyreme.vision.transforms' has no attribute {name!r}{nearest(name, __all__)}")
    return importlib.import_module("polyreme.vision.transforms.tensor").to_tensor
