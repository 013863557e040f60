"""Cells of a row of published runs: text and numbers, doubtful ones, and what was taken where they say nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping

from polyreme.errors import ConfigError

MOST = 10**9
"""Of any number of a row: more is a slip, and some questions would take hours."""

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE]\+?[0-9]+)?)(?:,?\s.*|[(;].*)?")
"""A number, and perhaps words after it."""

_OPEN = ("gbs", "mbs", "vpp")
"""Columns that a row can leave open: what predict finds fastest is taken."""

_UNKNOWN = ("", "?", "n/a", "na", "-", "none given", "unknown")


class Cells:
    """A row's cells, and what was taken where they say nothing."""

    def __init__(self, row: Mapping[str, str]) -> None:
        self._row = row
        self.assumed: dict[str, object] = {}
        self.not_understood: list[str] = []

    @property
    def label(self) -> str:
        """How messages name the row."""
        return self._row.get("id") or self._row.get("model") or "without an id"

    def text(self, column: str) -> str:
        """The cell, "" if not known; a doubtful value is taken."""
        value = self._row.get(column, "")
        value = "" if value.lower() in _UNKNOWN else value
        return value[:-1].strip() if value.endswith("?") else value

    def number(self, column: str) -> int | None:
        """The cell as a whole number, as rate. Raises ConfigError for a fraction too."""
        value = self.rate(column)
        if value is None or value == int(value):
            return None if value is None else int(value)
        raise ConfigError(f"row {self.label}: column {column!r} has {self.text(column)!r}; give a whole number")

    def rate(self, column: str) -> float | None:
        """The cell as a number; words may follow it: "8 (estimated)". Raises ConfigError for anything else, such as
        4k, 2x8 or 1-2, whose first number alone would be another one, and for a number above MOST; in a column that can
        be left open it is not known."""
        text = re.sub(r"(?<=[0-9])[,_](?=[0-9]{3}(?![0-9]))", "", self.text(column))
        if not text:
            return None
        match = _NUMBER.fullmatch(text)
        if not match:
            if column in _OPEN:  # words, such as "interleaved for large" or "1-4": what is taken is told
                return None
            raise ConfigError(f"row {self.label}: column {column!r} has {text!r}; give a number, or ? if not known")
        value = float(match[1])
        if value > MOST:
            raise ConfigError(f"row {self.label}: column {column!r} has {text!r}; give a number of at most {MOST:.0e}")
        return value

    def need(self, column: str) -> int:
        """The number that a row must have."""
        value = self.number(column)
        if not value:
            raise ConfigError(f"row {self.label}: column {column!r} is {self._row.get(column, '')!r}; give a number")
        return value

    def take(self, column: str, default: int) -> int:
        """The number, or a default, which is told."""
        value = self.number(column)
        if value is None:
            self.assumed[column] = default
            return default
        return value

    def is_yes(self, column: str) -> bool:
        """Whether the cell says so; a word that is neither is taken as no, which is told."""
        text = self.text(column).lower()
        if text.startswith(("yes", "1", "true")) or text == "on":
            return True
        if text and not text.startswith(("no", "0", "false", "off")):
            self.assumed[column] = f"no, as {text!r} is not known"
        return False

    @property
    def words(self) -> str:
        """What the row says in words: system, notes, recompute, sharding; lower case."""
        return "; ".join(self._row.get(c, "") for c in ("system", "notes", "recompute", "zero_or_fsdp")).lower()

    def has(self, *words: str) -> bool:
        """Whether notes, recompute or system mention one of the words, and not to say that it is not so."""
        return any(
            re.search(rf"(?<!\bno )(?<!\bnot )(?<!w/o )(?<!without ){re.escape(word)}", self.words) for word in words
        )

    def denies(self, word: str) -> bool:
        """Whether they say that it is not so: "no compile"."""
        return re.search(rf"\b(no|not|w/o|without)[ -]{re.escape(word)}", self.words) is not None

    @property
    def year(self) -> float:
        """Of the run, with its month as a part; 2024 if not told."""
        match = re.search(r"(20\d\d)(?:-(\d\d))?", self._row.get("date", ""))
        return int(match[1]) + (int(match[2] or 6) - 1) / 12 if match else 2024.0
