"""Imikolov: the Penn Treebank as prepared for language models.

The format: a sentence a line, words between spaces (Mikolov et al. 2010).
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any, ClassVar

import numpy as np

from polyreme.errors import ConfigError
from polyreme.io.dataset import Dataset
from polyreme.io.local_files import Published, chosen_mode, tar_texts
from polyreme.text.datasets.vocabulary import END, START, UNKNOWN, ids, more_frequent

_TEXT = "simple-examples/data/ptb.{}.txt"


class Imikolov(Dataset):
    """Sentences as numbers of words: n-grams, tuples of window_size numbers int64 (data_type "NGRAM"), or pairs of a
    sentence after "<s>" and the same before "<e>", int64 [n] each ("SEQ").

    data_file: simple-examples.tgz; without it the file is looked for where vision's MNIST is. window_size: with "SEQ",
    if positive, longer sentences (the mark counted) are left out. word_idx: the words that occur more than
    min_word_freq times in training and validation text, as bytes, and the marks, as str, to numbers; "<unk>" to the
    last. Raises DataError where the file is missing, torn or other than published; download=True cannot fetch it.
    """

    data_type: str
    window_size: int
    mode: str
    data_file: str
    word_idx: dict[str | bytes, int]
    data: list[tuple[Any, ...]]

    FILE: ClassVar[Published] = Published(
        "imikolov",
        "simple-examples.tgz",
        "30177ea32e27c525793142b6bf2c8e2d",
        "https://dataset.bj.bcebos.com/imikolov%2Fsimple-examples.tgz",
    )

    def __init__(
        self,
        data_file: str | os.PathLike[str] | None = None,
        data_type: str = "NGRAM",
        window_size: int = -1,
        mode: str = "train",
        min_word_freq: int = 50,
        download: bool = True,
    ) -> None:
        if not isinstance(data_type, str) or data_type.upper() not in ("NGRAM", "SEQ"):
            raise ConfigError(f"Imikolov: data_type={data_type!r}; give 'NGRAM' or 'SEQ'")
        if data_type.upper() == "NGRAM" and window_size < 1:
            raise ConfigError(f"Imikolov: window_size={window_size}; give the n of n-grams, at least 1")
        self.data_type, self.window_size = data_type.upper(), window_size
        self.mode = chosen_mode("Imikolov", mode, ("train", "test"))
        self.min_word_freq = min_word_freq
        path = self.FILE.find("Imikolov", data_file, download)
        self.data_file = str(path)
        kinds = ("train", "valid", self.mode)
        found = tar_texts(path, tuple(_TEXT.format(kind) for kind in dict.fromkeys(kinds)))
        texts = [[line.split() for line in found[_TEXT.format(kind)].splitlines()] for kind in kinds]
        self.word_idx = self._dictionary([*texts[0], *texts[1]])
        self.data = [sample for line in texts[2] for sample in self._samples(line)]

    def _dictionary(self, lines: list[list[bytes]]) -> dict[str | bytes, int]:
        counts: Counter[str | bytes] = Counter(word for line in lines for word in line)
        # the text has the mark of unknown words in it; it takes the last number
        counts.pop(UNKNOWN.encode(), None)
        counts.update({START: len(lines), END: len(lines)})
        found = more_frequent(counts, self.min_word_freq)
        found[UNKNOWN] = len(found)
        return found

    def _samples(self, line: list[bytes]) -> list[tuple]:
        unknown = self.word_idx[UNKNOWN]
        start, end = self.word_idx.get(START, unknown), self.word_idx.get(END, unknown)
        inside = ids(line, self.word_idx, unknown)
        if self.data_type == "SEQ":
            too_long = 0 < self.window_size < len(inside) + 1
            return [] if too_long else [([start, *inside], [*inside, end])]
        whole, n = [start, *inside, end], self.window_size
        return [tuple(whole[at : at + n]) for at in range(len(whole) - n + 1)]

    def __getitem__(self, idx: int) -> tuple[np.ndarray, ...]:
        return tuple(np.array(part, np.int64) for part in self.data[idx])

    def __len__(self) -> int:
        return len(self.data)
