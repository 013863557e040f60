"""VOC2012: pictures and their segmentation into classes.

The format: http://host.robots.ox.ac.uk/pascal/VOC/voc2012/.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from polyreme.errors import DataError
from polyreme.io.archives import open_tar, open_unpacked, readable
from polyreme.io.dataset import Dataset
from polyreme.io.local_files import Published, chosen_mode
from polyreme.vision.image import check_backend, image_load

_ROOT = "VOCdevkit/VOC2012"


class VOC2012(Dataset):
    """(image, segmentation), whose pixels are classes: 2,913 to train ("trainval"), 1,464 to test ("train"), 1,449 to
    validate ("val"): the parts of the published set that have labels, under PaddlePaddle's names for them.

    data_file: VOCtrainval_11-May-2012.tar; without it the file is looked for where MNIST's are. Both are Pillow images
    (backend "pil") or float32 ndarrays [height, width, 3] and [height, width] ("cv2"); transform is applied to the
    image. Pictures are read from the archive when asked for. Raises DataError where the file is missing, torn,
    compressed or other than published; download=True cannot fetch it.
    """

    transform: Callable[..., Any] | None

    mode: str
    backend: str
    data_file: str

    FILE: ClassVar[Published] = Published(
        "voc2012",
        "VOCtrainval_11-May-2012.tar",
        "6cd6e144f989b92b3379bac3b3de84fd",
        "https://dataset.bj.bcebos.com/voc/VOCtrainval_11-May-2012.tar",
    )
    PARTS: ClassVar[dict[str, str]] = {"train": "trainval", "test": "train", "valid": "val"}

    def __init__(
        self,
        data_file: str | os.PathLike[str] | None = None,
        mode: str = "train",
        transform: Callable[[Any], Any] | None = None,
        download: bool = True,
        backend: str | None = None,
    ) -> None:
        self.mode = chosen_mode("VOC2012", mode, tuple(self.PARTS))
        self.transform, self.backend = transform, check_backend(backend)
        path = self.FILE.find("VOC2012", data_file, download)
        self.data_file = str(path)
        # where each file lies in the archive: any process can read it from there, which an open archive could not
        with open_tar(path, compression=False) as archive:
            where = {m.name.removeprefix("./"): (m.offset_data, m.size) for m in archive if m.isfile()}
        names = self._read(self._place(where, f"ImageSets/Segmentation/{self.PARTS[self.mode]}.txt")).decode().split()
        self._pairs = [
            (self._place(where, f"JPEGImages/{n}.jpg"), self._place(where, f"SegmentationClass/{n}.png")) for n in names
        ]

    def __getitem__(self, idx: int) -> tuple[Any, Any]:
        image, label = (image_load(io.BytesIO(self._read(p)), "pil") for p in self._pairs[idx])  # type: ignore[arg-type]
        if self.backend == "cv2":
            image, label = np.asarray(image, np.float32), np.asarray(label, np.float32)
        if self.transform is not None:
            image = self.transform(image)
        return image, label

    def __len__(self) -> int:
        return len(self._pairs)

    def _place(self, where: dict[str, tuple[int, int]], name: str) -> tuple[int, int]:
        if f"{_ROOT}/{name}" not in where:
            raise DataError(f"{self.data_file}: holds no {_ROOT}/{name}; is it the archive that was meant?")
        return where[f"{_ROOT}/{name}"]

    def _read(self, place: tuple[int, int]) -> bytes:
        with readable(Path(self.data_file)), open_unpacked(Path(self.data_file), compression=False) as file:
            file.seek(place[0])
            return file.read(place[1])
