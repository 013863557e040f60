"""DatasetFolder and ImageFolder: files of one's own in folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from polyreme.errors import ConfigError, DataError
from polyreme.io.dataset import Dataset
from polyreme.vision.image import get_image_backend, image_load

IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Endings of the files that are samples unless others are given."""


class DatasetFolder(Dataset):
    """(sample, class index) for every file under root/CLASS/, in folders of any depth, in the order of names.

    A file is a sample if its name ends in one of extensions (those of images by default, upper case too), or if
    is_valid_file(path) is true; only one of the two is given. loader(path) reads it: by default a Pillow image in RGB,
    or with image backend "cv2" an ndarray, blue first. Raises DataError where there is no folder or no sample.
    """

    loader: Callable[..., Any]
    transform: Callable[..., Any] | None

    root: str
    extensions: tuple[str, ...] | None
    classes: list[Any]
    class_to_idx: dict[Any, int]
    samples: list[tuple[str, int]]
    targets: list[int]

    def __init__(
        self,
        root: str | os.PathLike[str],
        loader: Callable[[str], Any] | None = None,
        extensions: Sequence[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
    ) -> None:
        self.root, self.loader, self.transform = os.fspath(root), loader or load_rgb, transform
        self.extensions, fits = _chooser("DatasetFolder", extensions, is_valid_file)
        self.classes = sorted(e.name for e in _entries("DatasetFolder", self.root) if e.is_dir())
        self.class_to_idx = {name: index for index, name in enumerate(self.classes)}
        self.samples = [
            (path, index)
            for name, index in self.class_to_idx.items()
            for path in _files(os.path.join(self.root, name))
            if fits(path)
        ]
        self.targets = [index for _, index in self.samples]
        _need_samples("DatasetFolder", f"{self.root}/CLASS", self.samples, self.extensions)

    def __getitem__(self, idx: int) -> tuple[Any, int]:
        path, target = self.samples[idx]
        sample = self.loader(path)
        return sample if self.transform is None else self.transform(sample), target

    def __len__(self) -> int:
        return len(self.samples)


class ImageFolder(Dataset):
    """[sample] for every file under root, in folders of any depth; arguments and order as DatasetFolder's."""

    loader: Callable[..., Any]
    transform: Callable[..., Any] | None

    root: str
    extensions: tuple[str, ...] | None
    samples: list[str]

    def __init__(
        self,
        root: str | os.PathLike[str],
        loader: Callable[[str], Any] | None = None,
        extensions: Sequence[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
    ) -> None:
        self.root, self.loader, self.transform = os.fspath(root), loader or load_rgb, transform
        self.extensions, fits = _chooser("ImageFolder", extensions, is_valid_file)
        _entries("ImageFolder", self.root)
        self.samples = [path for path in _files(self.root) if fits(path)]
        _need_samples("ImageFolder", self.root, self.samples, self.extensions)

    def __getitem__(self, idx: int) -> list[Any]:
        sample = self.loader(self.samples[idx])
        return [sample if self.transform is None else self.transform(sample)]

    def __len__(self) -> int:
        return len(self.samples)


def load_rgb(path: str) -> Any:
    """An image file in the backend in force: a Pillow image in RGB, or an ndarray uint8, blue first."""
    return image_load(path).convert("RGB") if get_image_backend() == "pil" else image_load(path)


def _chooser(
    owner: str, extensions: Sequence[str] | None, is_valid_file: Callable[[str], bool] | None
) -> tuple[tuple[str, ...] | None, Callable[[str], bool]]:
    if is_valid_file is not None:
        if extensions is not None:
            raise ConfigError(f"{owner}: extensions and is_valid_file both say which files are samples; give one")
        return None, is_valid_file
    endings = IMAGES if extensions is None else tuple(e.lower() for e in extensions)
    return endings, lambda path: path.lower().endswith(endings)


def _entries(owner: str, root: str) -> list[os.DirEntry]:
    if not os.path.isdir(root):
        raise DataError(f"{owner}: root={root!r} is no folder; give one that holds the files")
    with os.scandir(root) as entries:
        return list(entries)


def _files(folder: str) -> list[str]:
    """Every file under folder: those in it before those in folders, each in the order of names; links are followed."""
    return [
        os.path.join(at, name) for at, _, names in sorted(os.walk(folder, followlinks=True)) for name in sorted(names)
    ]


def _need_samples(owner: str, where: str, samples: Sequence[Any], endings: tuple[str, ...] | None) -> None:
    if not samples:
        wanted = "for which is_valid_file is true" if endings is None else f"that ends in {', '.join(endings)}"
        raise DataError(f"{owner}: no file under {where} {wanted}; give another root, or say which files are samples")
