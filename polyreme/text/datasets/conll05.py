"""Conll05st: sentences with the semantic roles of their verbs.

The format: https://www.cs.upc.edu/~srlconll/spec.html (columns of words and of roles).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np

from polyreme.errors import DataError
from polyreme.io.archives import gunzipped, readable
from polyreme.io.dataset import Dataset
from polyreme.io.local_files import Published, tar_texts
from polyreme.text.datasets.vocabulary import ids

_URL = "http://paddlemodels.bj.bcebos.com/conll05st"
_WORDS, _ROLES = (f"conll05st-release/test.wsj/{kind}/test.wsj.{kind}.gz" for kind in ("words", "props"))
_UNKNOWN = 0
# offsets of the words around a verb that a sample has
_AROUND = (-2, -1, 0, 1, 2)


class Conll05st(Dataset):
    """(words, word 2 before the verb, 1 before, the verb, 1 after, 2 after, the verb's number, mark, labels), int64 [n]
    each: a sample for each verb of each sentence. Words around the verb and its number are repeated n times; mark is 1
    within two words of the verb; labels are B-, I- and O of the roles.

    data_file: conll05st-tests.tar.gz, whose sentences are for testing; word_dict_file, verb_dict_file and
    target_dict_file: an entry a line; those not given are looked for where vision's MNIST is, and so is emb_file, whose
    path get_embedding() gives. Words, "bos" and "eos" not in the dictionary are 0. Raises DataError where a file is
    missing, torn or other than published; download=True cannot fetch it.
    """

    data_file: str
    word_dict: dict[str, int]
    predicate_dict: dict[str, int]
    label_dict: dict[str, int]
    samples: list[tuple[list[str], str, list[str]]]

    FILES: ClassVar[tuple[Published, ...]] = (
        Published(
            "conll05st",
            "conll05st-tests.tar.gz",
            "387719152ae52d60422c016e92a742fc",
            f"{_URL}/conll05st-tests.tar.gz",
        ),
        Published(
            "conll05st", "wordDict.txt", "ea7fb7d4c75cc6254716f0177a506baa", f"{_URL}%2FwordDict.txt", "word_dict_file"
        ),
        Published(
            "conll05st", "verbDict.txt", "0d2977293bbb6cbefab5b0f97db1e77c", f"{_URL}%2FverbDict.txt", "verb_dict_file"
        ),
        Published(
            "conll05st",
            "targetDict.txt",
            "d8c7f03ceb5fc2e5a0fa7503a4353751",
            f"{_URL}%2FtargetDict.txt",
            "target_dict_file",
        ),
    )
    EMBEDDING: ClassVar[Published] = Published(
        "conll05st", "emb", "bf436eb0faa1f6f9103017f8be57cdb7", f"{_URL}%2Femb", "emb_file"
    )

    def __init__(
        self,
        data_file: str | os.PathLike[str] | None = None,
        word_dict_file: str | os.PathLike[str] | None = None,
        verb_dict_file: str | os.PathLike[str] | None = None,
        target_dict_file: str | os.PathLike[str] | None = None,
        emb_file: str | os.PathLike[str] | None = None,
        download: bool = True,
    ) -> None:
        given = (data_file, word_dict_file, verb_dict_file, target_dict_file)
        archive, *dictionaries = (f.find("Conll05st", g, download) for f, g in zip(self.FILES, given, strict=True))
        self.data_file = str(archive)
        # only get_embedding() needs it, and it is large: looked for when asked
        self._embedding = emb_file
        self.word_dict, self.predicate_dict = (_number(path) for path in dictionaries[:2])
        self.label_dict = _labels(dictionaries[2])
        self.samples = list(_samples(archive))

    def __getitem__(self, idx: int) -> tuple[np.ndarray, ...]:
        words, verb, labels = self.samples[idx]
        at, n = labels.index("B-V"), len(words)
        padded = ["bos", "bos", *words, "eos", "eos"]
        # two "bos" stand before the first word
        around = ids([padded[at + 2 + offset] for offset in _AROUND], self.word_dict, _UNKNOWN)
        marks = [1 if abs(i - at) <= 2 else 0 for i in range(n)]
        columns = [ids(words, self.word_dict, _UNKNOWN), *([word] * n for word in around)]
        columns += [[self._number(self.predicate_dict, verb)] * n, marks]
        columns.append([self._number(self.label_dict, label) for label in labels])
        return tuple(np.array(column, np.int64) for column in columns)

    def _number(self, dictionary: dict[str, int], entry: str) -> int:
        if entry not in dictionary:
            raise DataError(
                f"{self.data_file}: has {entry!r}, which the dictionary lacks; give the one that goes with it"
            )
        return dictionary[entry]

    def __len__(self) -> int:
        return len(self.samples)

    def get_dict(self) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """The dictionaries of words, verbs and labels."""
        return self.word_dict, self.predicate_dict, self.label_dict

    def get_embedding(self) -> str:
        """The path of the file of word vectors. Raises DataError without one."""
        return str(self.EMBEDDING.find("Conll05st", self._embedding, False))


def _lines(path: Path) -> list[str]:
    with readable(path):
        return path.read_text().splitlines()


def _number(path: Path) -> dict[str, int]:
    return {line.strip(): index for index, line in enumerate(_lines(path))}


def _labels(path: Path) -> dict[str, int]:
    """B- and I- of each role, in the order of their first appearance, then O."""
    roles = dict.fromkeys(line[2:].strip() for line in _lines(path) if line.startswith(("B-", "I-")))
    return {label: at for at, label in enumerate([*(f"{kind}-{role}" for role in roles for kind in "BI"), "O"])}


def _samples(archive: Path) -> Iterator[tuple[list[str], str, list[str]]]:
    """(words, verb, labels) of each verb."""
    found = tar_texts(archive, (_WORDS, _ROLES))
    with readable(archive):
        words, roles = (gunzipped(found[name], f"{archive}: {name}").decode().split("\n") for name in (_WORDS, _ROLES))
    sentence: list[str] = []
    rows: list[list[str]] = []
    for word, columns in zip(words, roles, strict=False):
        if columns.split():
            sentence.append(word.strip())
            rows.append(columns.split())
            continue
        yield from _verbs(archive, sentence, rows)
        sentence, rows = [], []


def _verbs(archive: Path, sentence: list[str], rows: list[list[str]]) -> Iterator[tuple[list[str], str, list[str]]]:
    verbs = [row[0] for row in rows if row[0] != "-"]
    for column, verb in enumerate(verbs, start=1):
        if any(len(row) <= column for row in rows):
            raise DataError(f"{archive}: {' '.join(sentence)!r} has no column of roles for {verb!r}")
        labels = list(_spread(row[column] for row in rows))
        if "B-V" not in labels:
            raise DataError(f"{archive}: {' '.join(sentence)!r} marks no word as the verb {verb!r}")
        yield sentence, verb, labels


def _spread(brackets: Iterator[str]) -> Iterator[str]:
    """(A0* * *) * as B-A0 I-A0 I-A0 O."""
    inside = ""
    for bracket in brackets:
        if bracket.startswith("("):
            inside = bracket[1 : bracket.index("*")]
            yield f"B-{inside}"
        else:
            yield f"I-{inside}" if inside else "O"
        if bracket.endswith(")"):
            inside = ""
