"""Handwritten digits as readers: (pixels float32 [784] from -1 to 1, label int).

Files are those of polyreme.vision.datasets.MNIST, in the folders where that looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from polyreme.vision.datasets import MNIST

Reader = Callable[[], Iterator[tuple[np.ndarray, int]]]


def _reader(mode: str) -> Reader:
    data = MNIST(mode=mode, backend="cv2")

    def read() -> Iterator[tuple[np.ndarray, int]]:
        for image, label in zip(data.images, data.labels, strict=True):
            yield np.asarray(image, np.float32).reshape(784) / 127.5 - 1, int(label)

    return read


def train() -> Reader:
    """A reader of the 60,000 digits to train with. Raises DataError, which says where files belong, without them."""
    return _reader("train")


def test() -> Reader:
    """A reader of the 10,000 digits to test with. Raises DataError without files."""
    return _reader("test")


__all__ = ["test", "train"]
