"""Flowers: Oxford's 102 kinds of flowers.

The format: https://www.robots.ox.ac.uk/~vgg/data/flowers/102/.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from polyreme.errors import DataError
from polyreme.io.dataset import Dataset
from polyreme.io.local_files import Published, chosen_mode, tar_files
from polyreme.vision.datasets.mat_file import read_mat
from polyreme.vision.image import check_backend, image_load

_URL = "http://paddlemodels.bj.bcebos.com/flowers/"


class Flowers(Dataset):
    """Pictures of flowers: (image, label int64 [1] from 1 to 102); 6,149 to train, 1,020 to test, 1,020 to validate.

    data_file, label_file, setid_file: 102flowers.tgz, imagelabels.mat, setid.mat; those not given are looked for where
    MNIST's are. The published split is small for training, so, as in PaddlePaddle, "train" is its test part and "test"
    its training part. An image is a Pillow image (backend "pil") or a float32 ndarray [height, width, 3], red first
    ("cv2"). The pictures of the mode are kept in memory, compressed: up to 260 MB. Raises DataError where a file is
    missing or torn; download=True cannot fetch it.
    """

    transform: Callable[..., Any] | None
    indexes: np.ndarray
    labels: np.ndarray

    mode: str
    backend: str

    FILES: ClassVar[tuple[Published, ...]] = (
        Published("flowers", "102flowers.tgz", "52808999861908f626f3c1f4e79d11fa", f"{_URL}102flowers.tgz"),
        Published(
            "flowers", "imagelabels.mat", "e0620be6f572b9609742df49c70aed4d", f"{_URL}imagelabels.mat", "label_file"
        ),
        Published("flowers", "setid.mat", "a5357ecc9cb78c4bef273ce3793fc85c", f"{_URL}setid.mat", "setid_file"),
    )
    PARTS: ClassVar[dict[str, str]] = {"train": "tstid", "test": "trnid", "valid": "valid"}

    def __init__(
        self,
        data_file: str | os.PathLike[str] | None = None,
        label_file: str | os.PathLike[str] | None = None,
        setid_file: str | os.PathLike[str] | None = None,
        mode: str = "train",
        transform: Callable[[Any], Any] | None = None,
        download: bool = True,
        backend: str | None = None,
    ) -> None:
        self.mode = chosen_mode("Flowers", mode, tuple(self.PARTS))
        self.transform, self.backend = transform, check_backend(backend)
        given = (data_file, label_file, setid_file)
        archive, labels, parts = (f.find("Flowers", g, download) for f, g in zip(self.FILES, given, strict=True))
        self.indexes = _array(parts, self.PARTS[self.mode]).astype(np.int64)
        every = _array(labels, "labels").astype(np.int64)
        if self.indexes.size and not 1 <= self.indexes.min() <= self.indexes.max() <= every.size:
            raise DataError(f"{parts}: numbers images up to {self.indexes.max()}, {labels} labels {every.size}")
        self.labels = every[self.indexes - 1]
        wanted = {f"image_{index:05d}.jpg" for index in self.indexes.tolist()}
        named = ((name.rsplit("/", 1)[-1], file) for name, file in tar_files(archive))
        files = {name: file.read() for name, file in named if name in wanted}
        missing = sorted(wanted - set(files))
        if missing:
            raise DataError(
                f"{archive}: holds no {missing[0]}, and {len(missing) - 1} more of {len(wanted)} are missing"
            )
        self._pictures = [files[f"image_{index:05d}.jpg"] for index in self.indexes.tolist()]

    def __getitem__(self, idx: int) -> tuple[Any, np.ndarray]:
        image: Any = image_load(io.BytesIO(self._pictures[idx]), "pil")  # type: ignore[arg-type]
        if self.backend == "cv2":
            image = np.asarray(image, np.float32)
        if self.transform is not None:
            image = self.transform(image)
        return image, np.array([self.labels[idx]])

    def __len__(self) -> int:
        return len(self.labels)


def _array(path: Path, name: str) -> np.ndarray:
    arrays = read_mat(path)
    if name not in arrays:
        raise DataError(f"{path}: has no array {name!r}, only {', '.join(arrays) or 'none'}")
    return arrays[name].reshape(-1)
