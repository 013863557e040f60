"""UCIHousing: prices of houses in Boston, and thirteen features of where they stand.

The format: https://archive.ics.uci.edu/ml/datasets/Housing (14 numbers a row).
"""

from __future__ import annotations

import os
from typing import ClassVar

import numpy as np

from polyreme.errors import DataError
from polyreme.io.archives import readable
from polyreme.io.dataset import Dataset
from polyreme.io.local_files import Published, chosen_mode

_COLUMNS = 14
_TRAINING_SHARE = 0.8


class UCIHousing(Dataset):
    """(features float32 [13], price float32 [1], in thousands of dollars): the first four fifths to train, the rest to
    test. A feature is (value - mean) / (largest - smallest) over all rows.

    data_file: housing.data; without it the file is looked for where vision's MNIST is. Raises DataError where the file
    is missing, torn or other than published; download=True cannot fetch it.
    """

    mode: str
    data_file: str

    FILE: ClassVar[Published] = Published(
        "uci_housing",
        "housing.data",
        "d4accdce7a25600298819f8e28e8d593",
        "http://paddlemodels.bj.bcebos.com/uci_housing/housing.data",
    )

    def __init__(
        self, data_file: str | os.PathLike[str] | None = None, mode: str = "train", download: bool = True
    ) -> None:
        self.mode = chosen_mode("UCIHousing", mode, ("train", "test"))
        path = self.FILE.find("UCIHousing", data_file, download)
        self.data_file = str(path)
        with readable(path):
            text = path.read_text()
        try:
            numbers = np.array(text.split(), np.float64)
        except ValueError as error:
            raise DataError(f"{path}: {error}; it holds numbers alone") from error
        if not numbers.size or numbers.size % _COLUMNS:
            raise DataError(f"{path}: {numbers.size} numbers, which are no rows of {_COLUMNS}; fetch the file again")
        rows = numbers.reshape(-1, _COLUMNS)
        features = rows[:, :-1]
        span = features.max(0) - features.min(0)
        rows[:, :-1] = (features - features.mean(0)) / np.where(span > 0, span, 1)
        cut = int(len(rows) * _TRAINING_SHARE)
        self.data = rows[:cut] if self.mode == "train" else rows[cut:]

    def __getitem__(self, idx: int) -> tuple[np.ndarray, np.ndarray]:
        row = self.data[idx].astype(np.float32)
        return row[:-1], row[-1:]

    def __len__(self) -> int:
        return len(self.data)
