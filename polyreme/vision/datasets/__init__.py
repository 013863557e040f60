"""Image data sets read from local files; nothing is downloaded."""

from polyreme.module_names import suggest_names
from polyreme.vision.datasets.cifar import Cifar10, Cifar100
from polyreme.vision.datasets.flowers import Flowers
from polyreme.vision.datasets.folder import DatasetFolder, ImageFolder
from polyreme.vision.datasets.mnist import MNIST, FashionMNIST
from polyreme.vision.datasets.voc2012 import VOC2012

__all__ = [
    "MNIST",
    "VOC2012",
    "Cifar10",
    "Cifar100",
    "DatasetFolder",
    "FashionMNIST",
    "Flowers",
    "ImageFolder",
]

suggest_names(__name__)
