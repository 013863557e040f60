"""Image models, transforms and datasets. Names load when first used, so that worker processes never import jax."""

import importlib
from typing import Any

_HOME = {
    "LeNet": "models.lenet",
    "ResNet": "models.resnet",
    "resnet18": "models.resnet",
    "resnet34": "models.resnet",
    "resnet50": "models.resnet",
    "resnet101": "models.resnet",
    "resnet152": "models.resnet",
    "wide_resnet50_2": "models.resnet",
    "wide_resnet101_2": "models.resnet",
    "resnext50_32x4d": "models.resnet",
    "resnext50_64x4d": "models.resnet",
    "resnext101_32x4d": "models.resnet",
    "resnext101_64x4d": "models.resnet",
    "resnext152_32x4d": "models.resnet",
    "resnext152_64x4d": "models.resnet",
    "get_image_backend": "image",
    "set_image_backend": "image",
    "image_load": "image",
}
_PACKAGES = ("datasets", "models", "ops", "transforms")
__all__ = [*_HOME, *_PACKAGES]  # pyright: ignore[reportUnsupportedDunderAll]  (names load late)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"polyreme.vision.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'polyreme.vision' has no attribute {name!r}")
    return getattr(importlib.import_module(f"polyreme.vision.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
