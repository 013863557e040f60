"""WMT16: descriptions of pictures in English and German.

The format: Multi30K (Elliott et al. 2016) as packed by PaddlePaddle: a pair of sentences a line, English first, a tab
between them.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import numpy as np

from polyreme.errors import ConfigError
from polyreme.io.dataset import Dataset
from polyreme.io.local_files import Published, chosen_mode, tar_texts
from polyreme.text.datasets.vocabulary import (
    END,
    START,
    UNKNOWN,
    check_vocabulary_size,
    ids,
    most_frequent,
    reversed_dictionary,
)

_LANGUAGES = ("en", "de")


class WMT16(Dataset):
    """(source, target, target's next words), int64: <s> source <e>; <s> target; target <e>.

    data_file: wmt16.tar.gz; without it the file is looked for where vision's MNIST is. mode: "train", "test" or "val".
    src_dict_size, trg_dict_size: how many words each dictionary has, the marks <s>, <e>, <unk> (0, 1, 2) included; they
    must be given. Dictionaries are counted anew from the training sentences of their own language each time;
    PaddlePaddle 3.3.1 keeps them as files, and fills the target's with words of the source. lang: the source, "en" or
    "de". Raises DataError where the file is missing, torn or other than published; download=True cannot fetch it.
    """

    mode: str
    src_dict_size: int
    trg_dict_size: int
    data_file: str
    src_dict: dict[str, int]
    trg_dict: dict[str, int]
    src_ids: list[list[int]]
    trg_ids: list[list[int]]
    trg_ids_next: list[list[int]]

    FILE: ClassVar[Published] = Published(
        "wmt16",
        "wmt16.tar.gz",
        "0c38be43600334966403524a40dcd81e",
        "http://paddlemodels.bj.bcebos.com/wmt/wmt16.tar.gz",
    )

    def __init__(
        self,
        data_file: str | os.PathLike[str] | None = None,
        mode: str = "train",
        src_dict_size: int = -1,
        trg_dict_size: int = -1,
        lang: str = "en",
        download: bool = True,
    ) -> None:
        self.mode = chosen_mode("WMT16", mode, ("train", "test", "val"))
        if lang not in _LANGUAGES:
            raise ConfigError(f"WMT16: lang={lang!r}; give 'en' or 'de'")
        self.lang, self.target_lang = lang, _LANGUAGES[1 - _LANGUAGES.index(lang)]
        self.src_dict_size = check_vocabulary_size("WMT16", "src_dict_size", src_dict_size)
        self.trg_dict_size = check_vocabulary_size("WMT16", "trg_dict_size", trg_dict_size)
        path = self.FILE.find("WMT16", data_file, download)
        self.data_file = str(path)
        wanted = ("wmt16/train", f"wmt16/{self.mode}")
        texts = tar_texts(path, tuple(dict.fromkeys(wanted)))
        source = _LANGUAGES.index(lang)
        training = _pairs(texts["wmt16/train"])
        self.src_dict = most_frequent((w for pair in training for w in pair[source].split()), src_dict_size)
        self.trg_dict = most_frequent((w for pair in training for w in pair[1 - source].split()), trg_dict_size)
        pairs = _pairs(texts[wanted[1]])
        unknown = self.src_dict.get(UNKNOWN, 2)
        self.src_ids = [ids([START, *pair[source].split(), END], self.src_dict, unknown) for pair in pairs]
        targets = [ids(pair[1 - source].split(), self.trg_dict, unknown) for pair in pairs]
        start, end = ids([START, END], self.trg_dict, unknown)
        self.trg_ids = [[start, *target] for target in targets]
        self.trg_ids_next = [[*target, end] for target in targets]

    def __getitem__(self, idx: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        parts = self.src_ids[idx], self.trg_ids[idx], self.trg_ids_next[idx]
        return tuple(np.array(part, np.int64) for part in parts)  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self.src_ids)

    def get_dict(self, lang: str, reverse: bool = False) -> dict[Any, Any]:
        """The dictionary of a language, "en" or "de": words to numbers, or with reverse=True numbers to words."""
        if lang not in _LANGUAGES:
            raise ConfigError(f"WMT16.get_dict: lang={lang!r}; give 'en' or 'de'")
        found = self.src_dict if lang == self.lang else self.trg_dict
        return reversed_dictionary(found) if reverse else found


def _pairs(text: bytes) -> list[list[str]]:
    """The lines that are two sentences."""
    lines = (line.strip().split("\t") for line in text.decode().split("\n"))
    return [parts for parts in lines if len(parts) == 2]
