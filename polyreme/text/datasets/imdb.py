"""Imdb: film reviews, good and bad.

The format: https://ai.stanford.edu/~amaas/data/sentiment (Maas et al. 2011).
"""

from __future__ import annotations

import os
import re
import string
from collections import Counter
from typing import ClassVar

import numpy as np

from polyreme.errors import DataError
from polyreme.io.dataset import Dataset
from polyreme.io.local_files import Published, chosen_mode, tar_files
from polyreme.text.datasets.vocabulary import ids, more_frequent

_REVIEW = re.compile(r"aclImdb/(train|test)/(pos|neg)/.*\.txt$")
_PUNCTUATION = string.punctuation.encode()


class Imdb(Dataset):
    """(numbers of a review's words int64 [n], label int64 [1]): 0 for a good review, 1 for a bad one.

    data_file: aclImdb_v1.tar.gz; without it the file is looked for where vision's MNIST is. word_idx: the words that
    occur more than cutoff times in all reviews, as bytes, to numbers, and "<unk>" to the last. A review is in lower
    case and without punctuation; good ones come first, each kind in the archive's order. Raises DataError where the
    file is missing, torn or other than published; download=True cannot fetch it.
    """

    mode: str
    data_file: str
    word_idx: dict[str | bytes, int]
    docs: list[list[int]]
    labels: list[int]

    FILE: ClassVar[Published] = Published(
        "imdb",
        "aclImdb_v1.tar.gz",
        "7c2ac02c03563afcf9b574c7e56c153a",
        "https://dataset.bj.bcebos.com/imdb%2FaclImdb_v1.tar.gz",
    )

    def __init__(
        self,
        data_file: str | os.PathLike[str] | None = None,
        mode: str = "train",
        cutoff: int = 150,
        download: bool = True,
    ) -> None:
        self.mode = chosen_mode("Imdb", mode, ("train", "test"))
        path = self.FILE.find("Imdb", data_file, download)
        self.data_file = str(path)
        reviews: dict[str, list[list[bytes]]] = {"pos": [], "neg": []}
        counts: Counter[str | bytes] = Counter()
        for name, file in tar_files(path):
            place = _REVIEW.search(name)
            if place is None:
                continue
            words = file.read().rstrip(b"\n\r").translate(None, _PUNCTUATION).lower().split()
            counts.update(words)
            if place[1] == self.mode:
                reviews[place[2]].append(words)
        if not counts:
            raise DataError(f"{path}: holds no aclImdb/train/pos/*.txt and its like; is it the archive that was meant?")
        self.word_idx = more_frequent(counts, cutoff)
        self.word_idx["<unk>"] = unknown = len(self.word_idx)
        self.docs = [ids(words, self.word_idx, unknown) for kind in ("pos", "neg") for words in reviews[kind]]
        self.labels = [0] * len(reviews["pos"]) + [1] * len(reviews["neg"])

    def __getitem__(self, idx: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.docs[idx], np.int64), np.array([self.labels[idx]], np.int64)

    def __len__(self) -> int:
        return len(self.docs)
