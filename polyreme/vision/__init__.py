"""Image models, transforms and datasets. Names load when first used, so that worker processes never import jax."""

import importlib
from typing import Any

from polyreme.errors import nearest

_HOME = {
    "AlexNet": "models.alexnet",
    "alexnet": "models.alexnet",
    "DenseNet": "models.densenet",
    "densenet121": "models.densenet",
    "densenet161": "models.densenet",
    "densenet169": "models.densenet",
    "densenet201": "models.densenet",
    "densenet264": "models.densenet",
    "GoogLeNet": "models.googlenet",
    "googlenet": "models.googlenet",
    "InceptionV3": "models.inceptionv3",
    "inception_v3": "models.inceptionv3",
    "LeNet": "models.lenet",
    "MobileNetV1": "models.mobilenetv1",
    "mobilenet_v1": "models.mobilenetv1",
    "MobileNetV2": "models.mobilenetv2",
    "mobilenet_v2": "models.mobilenetv2",
    "MobileNetV3Large": "models.mobilenetv3",
    "MobileNetV3Small": "models.mobilenetv3",
    "mobilenet_v3_large": "models.mobilenetv3",
    "mobilenet_v3_small": "models.mobilenetv3",
    "ResNet": "models.resnet",
    "resnet18": "models.resnet",
    "resnet34": "models.resnet",
    "resnet50": "models.resnet",
    "resnet101": "models.resnet",
    "resnet152": "models.resnet",
    "resnext50_32x4d": "models.resnet",
    "resnext50_64x4d": "models.resnet",
    "resnext101_32x4d": "models.resnet",
    "resnext101_64x4d": "models.resnet",
    "resnext152_32x4d": "models.resnet",
    "resnext152_64x4d": "models.resnet",
    "wide_resnet50_2": "models.resnet",
    "wide_resnet101_2": "models.resnet",
    "ShuffleNetV2": "models.shufflenetv2",
    "shufflenet_v2_swish": "models.shufflenetv2",
    "shufflenet_v2_x0_25": "models.shufflenetv2",
    "shufflenet_v2_x0_33": "models.shufflenetv2",
    "shufflenet_v2_x0_5": "models.shufflenetv2",
    "shufflenet_v2_x1_0": "models.shufflenetv2",
    "shufflenet_v2_x1_5": "models.shufflenetv2",
    "shufflenet_v2_x2_0": "models.shufflenetv2",
    "SqueezeNet": "models.squeezenet",
    "squeezenet1_0": "models.squeezenet",
    "squeezenet1_1": "models.squeezenet",
    "VGG": "models.vgg",
    "vgg11": "models.vgg",
    "vgg13": "models.vgg",
    "vgg16": "models.vgg",
    "vgg19": "models.vgg",
    "VisionTransformer": "models.vit",
    "vit_b_16": "models.vit",
    "vit_b_32": "models.vit",
    "vit_l_16": "models.vit",
    "vit_l_32": "models.vit",
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
        raise AttributeError(f"module 'polyreme.vision' has no attribute {name!r}{nearest(name, __all__)}")
    return getattr(importlib.import_module(f"polyreme.vision.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
