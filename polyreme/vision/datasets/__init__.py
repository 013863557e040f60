"""Image data sets read from local files; nothing is downloaded."""

from polyreme.vision.datasets.mnist import MNIST, FashionMNIST

__all__ = ["MNIST", "FashionMNIST"]
