"""Cells of a row of published runs: text and numbers, doubtful ones, and what was taken where they say nothing.

Floor: 1.  Never imports: jax.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from polyreme.errors import ConfigError

_UNKNOWN = ("", "?", "n/a", "na", "-", "none given", "unknown")


class Cells:
    """A row's cells, and what was taken where they say nothing."""

    def __init__(self, row: Mapping[str, str]) -> None:
        self._row = row
        self.assumed: dict[str, object] = {}

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
        """The cell as a whole number. Raises ConfigError for one that starts with something else."""
        text = self.text(column).replace(",", "").replace("_", "")
        if not text:
            return None
        match = re.match(r"\d+(\.\d*)?([eE]\+?\d+)?", text)
        if not match:
            if column == "vpp":  # words, such as "interleaved for large"
                return None
            raise ConfigError(f"row {self.label}: column {column!r} has {text!r}; give a number, or ? if not known")
        return int(float(match[0]))

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

    def has(self, *words: str) -> bool:
        """Whether notes, recompute or system mention one of the words."""
        text = " ".join(self._row.get(c, "") for c in ("notes", "recompute", "system", "zero_or_fsdp")).lower()
        return any(word in text for word in words)

    @property
    def year(self) -> float:
        """Of the run, with its month as a part; 2024 if not told."""
        match = re.search(r"(20\d\d)(?:-(\d\d))?", self._row.get("date", ""))
        return int(match[1]) + (int(match[2] or 6) - 1) / 12 if match else 2024.0
