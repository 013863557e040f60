"""MNIST and FashionMNIST from local idx files.

The format: http://yann.lecun.com/exdb/mnist (big-endian magic number, sizes, bytes).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from polyreme.errors import ConfigError, DataError
from polyreme.io.archives import read_unpacked
from polyreme.io.dataset import Dataset
from polyreme.io.local_files import check_digest, data_folders
from polyreme.vision.image import check_backend, pillow

_log = logging.getLogger("polyreme.vision")
_PREFIX = {"train": "train", "test": "t10k"}
# in a checkout the data folder stands beside the package
_SHIPPED = Path(__file__).resolve().parents[3] / "data"


class MNIST(Dataset):
    """Handwritten digits: (image 28 x 28, label int64 [1]); 60,000 to train and 10,000 to test.

    image_path, label_path: idx files, gzipped or not. Without them, `NAME-images-idx3-ubyte(.gz)` and
    `NAME-labels-idx1-ubyte(.gz)` are looked for in the folders of `folders()`. An image is a Pillow image (backend
    "pil") or a float32 ndarray [28, 28] of 0 .. 255 ("cv2"); transform is applied to it. Raises DataError where files
    are missing, torn or other than their known digest; download=True cannot fetch them.
    """

    transform: Callable[..., Any] | None

    mode: str
    backend: str
    image_path: str
    label_path: str
    images: np.ndarray
    labels: np.ndarray

    NAME: ClassVar[str] = "mnist"
    # md5 of the gzipped files as published
    DIGESTS: ClassVar[dict[str, tuple[str, ...]]] = {
        "train-images": ("f68b3c2dcbeaaa9fbdd348bbdeb94873",),
        "train-labels": ("d53e105ee54ea40749a09fcbcd1e9432",),
        "t10k-images": ("9fb629c4189551a2d022fa330f9573f3",),
        "t10k-labels": ("ec29112dd5afa0611ce80d1b7f02629c",),
    }

    def __init__(
        self,
        image_path: str | os.PathLike[str] | None = None,
        label_path: str | os.PathLike[str] | None = None,
        mode: str = "train",
        transform: Callable[[Any], Any] | None = None,
        download: bool = True,
        backend: str | None = None,
    ) -> None:
        if mode not in _PREFIX:
            raise ConfigError(f"{type(self).__name__}: mode={mode!r}; give 'train' or 'test'")
        if (image_path is None) is not (label_path is None):
            raise ConfigError(f"{type(self).__name__}: give both image_path and label_path, or neither")
        if not isinstance(download, bool):
            raise ConfigError(f"{type(self).__name__}: download={download!r}; give True or False")
        self.mode, self.transform, self.backend = mode, transform, check_backend(backend)
        if image_path is None or label_path is None:
            image_path, label_path = self._find(_PREFIX[mode])
        self.image_path, self.label_path = str(image_path), str(label_path)
        self.images, self.labels = _read_pair(Path(image_path), Path(label_path))

    @classmethod
    def folders(cls) -> list[Path]:
        """Where files are looked for, in this order."""
        return data_folders(cls.NAME)

    def __getitem__(self, idx: int) -> tuple[Any, np.ndarray]:
        image: Any = self.images[idx]
        image = pillow().fromarray(image) if self.backend == "pil" else image.astype(np.float32)
        if self.transform is not None:
            image = self.transform(image)
        return image, np.array([self.labels[idx]])

    def __len__(self) -> int:
        return len(self.labels)

    def _find(self, prefix: str) -> tuple[Path, Path]:
        folders = self.folders()
        for folder in folders:
            paths = [_either(folder / f"{prefix}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1")]
            if paths[0] is not None and paths[1] is not None:
                for path, kind in zip(paths, ("images", "labels"), strict=True):
                    _check_digest(path, self.DIGESTS[f"{prefix}-{kind}"])
                self._found_in(folder)
                return paths[0], paths[1]
        raise DataError(
            f"{type(self).__name__}: no {prefix}-images-idx3-ubyte.gz with {prefix}-labels-idx1-ubyte.gz in "
            f"{' or '.join(map(str, folders))}; nothing is downloaded: put the files there, or give image_path and "
            "label_path"
        )

    def _found_in(self, folder: Path) -> None:
        """Called with the folder files were found in."""


class FashionMNIST(MNIST):
    """Grey pictures of clothes in ten classes, in MNIST's format.

    Where the full set is not found, a checkout of polyreme has a subset of 6,000 + 1,000 images, balanced by class, in
    data/fashion_mnist; it is used and a log line says so. `is_subset` tells which.
    """

    NAME: ClassVar[str] = "fashion-mnist"
    # as published; as in Debian's dataset-fashion-mnist (compressed again); the subset that is shipped
    DIGESTS: ClassVar[dict[str, tuple[str, ...]]] = {
        "train-images": (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "cf8536b0aa1a6ac5fa3f23001093305c",
            "9b726f05c7c5b775685f5135b11aa7cf",
        ),
        "train-labels": (
            "25c81989df183df01b3e8a0aad5dffbe",
            "10bea18fdb374794d4bb42e356e600c9",
            "84b343bef7b858098d917ad09f8aab9d",
        ),
        "t10k-images": (
            "bef4ecab320f06d8554ea6380940ec79",
            "f78720b4224f21cce2f2ccf2d7a94c9a",
            "b2ab7aaadae1a58bdcedfba84aab8b18",
        ),
        "t10k-labels": (
            "bb300cfdad3c16e7a12a480ee83cd310",
            "0d30e22e447f3c33dab9ed536400ac01",
            "05cbae676d53b2aedebc53a7a0016b7f",
        ),
    }
    is_subset = False

    @classmethod
    def folders(cls) -> list[Path]:
        return [*super().folders(), _SHIPPED / "fashion_mnist"]

    def _found_in(self, folder: Path) -> None:
        self.is_subset = folder == _SHIPPED / "fashion_mnist"
        if self.is_subset:
            _log.warning(
                "FashionMNIST: no full set in %s; using the subset of 6,000 training and 1,000 test images in %s",
                " or ".join(map(str, super().folders())),
                folder,
            )


def _either(path: Path) -> Path | None:
    return next((p for p in (path.with_name(f"{path.name}.gz"), path) if p.is_file()), None)


def _check_digest(path: Path | None, known: tuple[str, ...]) -> None:
    """The published digests are of the gzipped files; one that was unpacked is checked by its sizes alone."""
    if path is not None and path.suffix == ".gz":
        check_digest(path, known)


def _read_pair(image_path: Path, label_path: Path) -> tuple[np.ndarray, np.ndarray]:
    images, labels = read_idx(image_path), read_idx(label_path)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(
            f"{image_path} holds {list(images.shape)}, {label_path} {list(labels.shape)}; "
            "give images [n, rows, columns] and their labels [n]"
        )
    return images, labels.astype(np.int64)


def read_idx(path: Path) -> np.ndarray:
    """The bytes of an idx file, uint8, in their shape. Raises DataError for one that is missing or torn."""
    raw = read_unpacked(path)
    # two zero bytes, the type (8: unsigned byte) and the number of dims
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or not 1 <= raw[3] <= 3:
        raise DataError(f"{path}: starts with {raw[:4].hex(' ')!r}, an idx file of bytes with 00 00 08 and 01 to 03")
    start = 4 + 4 * raw[3]
    shape = tuple(np.frombuffer(raw[4:start], ">u4").tolist()) if len(raw) >= start else ()
    if len(shape) != raw[3] or math.prod(shape) != len(raw) - start:
        raise DataError(f"{path}: {len(raw) - start} bytes of data, its head says {list(shape)}; fetch the file again")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
