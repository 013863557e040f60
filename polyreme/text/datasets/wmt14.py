"""WMT14: sentences in French and English.

The format: http://www.statmt.org/wmt14, as packed by PaddlePaddle: two dictionaries, a word a line, and pairs of
sentences, a tab between them.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import numpy as np

from polyreme.io.dataset import Dataset
from polyreme.io.local_files import Published, chosen_mode, tar_texts
from polyreme.text.datasets.vocabulary import END, START, check_vocabulary_size, ids, reversed_dictionary

_UNKNOWN = 2
# longer sentences are left out
_LONGEST = 80


class WMT14(Dataset):
    """(source, target, target's next words), int64: <s> source <e>; <s> target; target <e>.

    data_file: wmt14.tgz; without it the file is looked for where vision's MNIST is. mode: "train", "test" or "gen".
    dict_size: how many words of each dictionary are used, the marks <s>, <e>, <unk> (0, 1, 2) included; it must be
    given. Pairs with more than 80 words in a sentence (the source's marks counted) are left out, as are lines that are
    no pair. Raises DataError where the file is missing, torn or other than published; download=True cannot fetch it.
    """

    mode: str
    dict_size: int
    data_file: str
    src_dict: dict[str, int]
    trg_dict: dict[str, int]

    FILE: ClassVar[Published] = Published(
        "wmt14",
        "wmt14.tgz",
        "0791583d57d5beb693b9414c5b36798c",
        "http://paddlemodels.bj.bcebos.com/wmt/wmt14.tgz",
    )

    def __init__(
        self,
        data_file: str | os.PathLike[str] | None = None,
        mode: str = "train",
        dict_size: int = -1,
        download: bool = True,
    ) -> None:
        self.mode = chosen_mode("WMT14", mode, ("train", "test", "gen"))
        self.dict_size = check_vocabulary_size("WMT14", "dict_size", dict_size)
        path = self.FILE.find("WMT14", data_file, download)
        self.data_file = str(path)
        pairs = f"{self.mode}/{self.mode}"
        texts = {n: t.decode() for n, t in tar_texts(path, ("train.src.dict", "train.trg.dict", pairs)).items()}
        self.src_dict, self.trg_dict = (_dictionary(texts[f"train.{side}.dict"], dict_size) for side in ("src", "trg"))
        self.src_ids: list[list[int]] = []
        self.trg_ids: list[list[int]] = []
        self.trg_ids_next: list[list[int]] = []
        for line in texts[pairs].split("\n"):
            parts = line.strip().split("\t")
            if len(parts) == 2:
                self._add(*parts)

    def _add(self, source: str, target: str) -> None:
        inward = ids([START, *source.split(), END], self.src_dict, _UNKNOWN)
        outward = ids(target.split(), self.trg_dict, _UNKNOWN)
        if len(inward) <= _LONGEST and len(outward) <= _LONGEST:
            self.src_ids.append(inward)
            self.trg_ids.append([self.trg_dict[START], *outward])
            self.trg_ids_next.append([*outward, self.trg_dict[END]])

    def __getitem__(self, idx: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        parts = self.src_ids[idx], self.trg_ids[idx], self.trg_ids_next[idx]
        return tuple(np.array(part, np.int64) for part in parts)  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self.src_ids)

    def get_dict(self, reverse: bool = False) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """The dictionaries of source and target: words to numbers, or with reverse=True numbers to words."""
        if reverse:
            return reversed_dictionary(self.src_dict), reversed_dictionary(self.trg_dict)
        return self.src_dict, self.trg_dict


def _dictionary(text: str, size: int) -> dict[str, int]:
    return {line.strip(): index for index, line in enumerate(text.splitlines()[:size])}
