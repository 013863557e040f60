"""Movielens: a million ratings of films, with what is known of the viewers and the films.

The format: https://grouplens.org/datasets/movielens/1m (README of ml-1m).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from polyreme.errors import ConfigError, DataError
from polyreme.io.archives import open_zip, readable
from polyreme.io.dataset import Dataset
from polyreme.io.local_files import Published, chosen_mode

_AGES = (1, 18, 25, 35, 45, 50, 56)
_TITLE = re.compile(r"^(.*)\((\d+)\)$")


@dataclass(frozen=True)
class MovieInfo:
    """A film: its number, its title without the year, its categories."""

    index: int
    title: str
    categories: tuple[str, ...]


@dataclass(frozen=True)
class UserInfo:
    """A viewer: number, whether male, age group (0 .. 6), occupation (0 .. 20)."""

    index: int
    is_male: bool
    age: int
    job_id: int


class Movielens(Dataset):
    """(user [1], gender [1] with 0 for male, age group [1], job [1], film [1], categories [n], title's words [m],
    rating [1]): int64, the rating float64 from -3 (one star) to 5 (five).

    data_file: ml-1m.zip; without it the file is looked for where vision's MNIST is. A rating is for testing with
    probability test_ratio, drawn with rand_seed in the file's order. Categories and words of titles have numbers in the
    order of their first appearance: categories_dict, movie_title_dict; movie_info and user_info say what is known of
    each. Raises DataError where the file is missing, torn or other than published; download=True cannot fetch it.
    """

    mode: str
    test_ratio: float
    rand_seed: int
    data_file: str
    movie_info: dict[int, MovieInfo]
    user_info: dict[int, UserInfo]
    categories_dict: dict[str, int]
    movie_title_dict: dict[str, int]
    data: list[tuple[list[Any], ...]]

    FILE: ClassVar[Published] = Published(
        "movielens",
        "ml-1m.zip",
        "c4d9eecfca2ab87c1945afe126590906",
        "https://dataset.bj.bcebos.com/movielens%2Fml-1m.zip",
    )

    def __init__(
        self,
        data_file: str | os.PathLike[str] | None = None,
        mode: str = "train",
        test_ratio: float = 0.1,
        rand_seed: int = 0,
        download: bool = True,
    ) -> None:
        self.mode = chosen_mode("Movielens", mode, ("train", "test"))
        if not 0 <= test_ratio <= 1:
            raise ConfigError(f"Movielens: test_ratio={test_ratio!r}; give a share from 0 to 1")
        self.test_ratio, self.rand_seed = test_ratio, rand_seed
        path = self.FILE.find("Movielens", data_file, download)
        self.data_file = str(path)
        movies, users, ratings = (_rows(path, name) for name in ("movies", "users", "ratings"))
        self.movie_info = {int(row[0]): _movie(row) for row in movies}
        self.user_info = {int(row[0]): _user(row) for row in users}
        films = self.movie_info.values()
        self.categories_dict = _number(c for film in films for c in film.categories)
        self.movie_title_dict = _number(w for film in films for w in film.title.lower().split())
        # the published generator of PaddlePaddle's split, so that the parts are the same
        draws = np.random.RandomState(rand_seed).random_sample(len(ratings))
        chosen = (draws < test_ratio) == (self.mode == "test")
        self.data = [self._sample(row) for row, is_in in zip(ratings, chosen.tolist(), strict=True) if is_in]

    def _sample(self, row: list[str]) -> tuple[list, ...]:
        try:
            user, film = self.user_info[int(row[0])], self.movie_info[int(row[1])]
        except KeyError as error:
            raise DataError(
                f"{self.data_file}: a rating is of user {row[0]} and film {row[1]}, one not listed"
            ) from error
        return (
            [user.index],
            [0 if user.is_male else 1],
            [user.age],
            [user.job_id],
            [film.index],
            [self.categories_dict[c] for c in film.categories],
            [self.movie_title_dict[w] for w in film.title.lower().split()],
            [float(row[2]) * 2 - 5],
        )

    def __getitem__(self, idx: int) -> tuple[np.ndarray, ...]:
        *numbers, rating = self.data[idx]
        return (*(np.array(n, np.int64) for n in numbers), np.array(rating))

    def __len__(self) -> int:
        return len(self.data)


def _rows(path: Path, name: str) -> list[list[str]]:
    try:
        with readable(path), open_zip(path) as archive, archive.open(f"ml-1m/{name}.dat") as file:
            return [line.split("::") for line in file.read().decode("latin-1").split("\n") if line]
    except KeyError as error:
        raise DataError(f"{path}: holds no ml-1m/{name}.dat; is it the archive that was meant?") from error


def _movie(row: list[str]) -> MovieInfo:
    index, title, categories = row
    named = _TITLE.match(title)
    return MovieInfo(int(index), named[1] if named else title, tuple(categories.strip().split("|")))


def _user(row: list[str]) -> UserInfo:
    index, gender, age, job = row[:4]
    return UserInfo(int(index), gender == "M", _AGES.index(int(age)), int(job))


def _number(words: Iterable[str]) -> dict[str, int]:
    return {word: index for index, word in enumerate(dict.fromkeys(words))}
