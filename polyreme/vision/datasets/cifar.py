"""CIFAR-10 and CIFAR-100 from their archives of pickled batches.

The format: https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from polyreme.errors import DataError
from polyreme.io.dataset import Dataset
from polyreme.io.local_files import Published, chosen_mode, tar_files
from polyreme.io.pickled_data import read_pickle
from polyreme.vision.image import check_backend, pillow


class Cifar10(Dataset):
    """Pictures 32 x 32 in ten classes: (image, label int64); 50,000 to train and 10,000 to test.

    data_file: cifar-10-python.tar.gz; without it the file is looked for where MNIST's are. An image is a Pillow image
    (backend "pil") or a float32 ndarray [32, 32, 3], red first, of 0 .. 255 ("cv2"); transform is applied to it. Raises
    DataError where the file is missing, torn or other than published; download=True cannot fetch it.
    """

    transform: Callable[..., Any] | None
    images: np.ndarray
    labels: np.ndarray

    mode: str
    backend: str
    data_file: str

    FILE: ClassVar[Published] = Published(
        "cifar",
        "cifar-10-python.tar.gz",
        "c58f30108f718f92721af3b95e74349a",
        "https://dataset.bj.bcebos.com/cifar/cifar-10-python.tar.gz",
    )
    # how the names of a mode's batches begin, and the key of the labels
    BATCHES: ClassVar[dict[str, str]] = {"train": "data_batch", "test": "test_batch"}
    LABELS: ClassVar[bytes] = b"labels"

    def __init__(
        self,
        data_file: str | os.PathLike[str] | None = None,
        mode: str = "train",
        transform: Callable[[Any], Any] | None = None,
        download: bool = True,
        backend: str | None = None,
    ) -> None:
        owner = type(self).__name__
        self.mode = chosen_mode(owner, mode, ("train", "test"))
        self.transform, self.backend = transform, check_backend(backend)
        path = self.FILE.find(owner, data_file, download)
        self.data_file = str(path)
        batches = [
            read_pickle(file, path)
            for name, file in tar_files(path)
            if name.rsplit("/", 1)[-1].startswith(self.BATCHES[self.mode])
        ]
        if not batches or any(not isinstance(b, dict) or b"data" not in b or self.LABELS not in b for b in batches):
            raise DataError(f"{path}: no batches {self.BATCHES[self.mode]}* with data and {self.LABELS.decode()} in it")
        if not all(_is_batch(b[b"data"], b[self.LABELS]) for b in batches):
            raise DataError(f"{path}: a batch is not of pictures uint8 [n, 3072] and n whole numbers; fetch it again")
        self.images = np.concatenate([b[b"data"] for b in batches]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        self.labels = np.concatenate([b[self.LABELS] for b in batches]).astype(np.int64)

    def __getitem__(self, idx: int) -> tuple[Any, np.ndarray]:
        image: Any = np.ascontiguousarray(self.images[idx])
        image = pillow().fromarray(image) if self.backend == "pil" else image.astype(np.float32)
        if self.transform is not None:
            image = self.transform(image)
        return image, np.asarray(self.labels[idx])

    def __len__(self) -> int:
        return len(self.labels)


def _is_batch(pictures: Any, labels: Any) -> bool:
    return (
        isinstance(pictures, np.ndarray)
        and pictures.dtype == np.uint8
        and pictures.ndim == 2
        and pictures.shape[1] == 3072
        and isinstance(labels, list)
        and len(labels) == len(pictures)
        and all(type(label) is int and 0 <= label < 100 for label in labels)
    )


class Cifar100(Cifar10):
    """Pictures in a hundred classes (the fine labels), otherwise as Cifar10; the file is cifar-100-python.tar.gz."""

    FILE: ClassVar[Published] = Published(
        "cifar",
        "cifar-100-python.tar.gz",
        "eb9058c3a382ffc7106e4002c42a8d85",
        "https://dataset.bj.bcebos.com/cifar/cifar-100-python.tar.gz",
    )
    BATCHES: ClassVar[dict[str, str]] = {"train": "train", "test": "test"}
    LABELS: ClassVar[bytes] = b"fine_labels"
