"""Documents of text, JSON lines and Parquet files, in blocks that any process can take apart by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from polyreme.data.parquet_file import read_columns
from polyreme.data.text_files import COMPRESSED, BadLines, decode, line_blocks
from polyreme.errors import ConfigError, DataError, did_you_mean

DIVISIONS = ("file", "paragraph", "line")
"""What is a document of a text file: all of it, what stands between blank lines, or each line. Or a regular expression
that begins with ^: a document begins with each line that it matches."""
_ENDINGS = {".txt": "text", ".text": "text", ".md": "text", ".jsonl": "json", ".ndjson": "json", ".json": "json",
            ".parquet": "parquet"}  # fmt: skip
_MAX_DOCUMENT_BYTES = 1 << 26  # it is tokenized at once, which takes many times that
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")


@dataclass(frozen=True)
class DocumentForm:
    """The form of documents in files: text files as one of DIVISIONS or a regular expression says, JSON and Parquet
    under a key."""

    division: str = "file"
    key: str = "text"

    def __post_init__(self) -> None:
        if self.division.startswith("^"):
            try:
                re.compile(self.division)
            except (re.error, OverflowError, RecursionError) as error:
                raise ConfigError(f"documents {self.division!r} is no regular expression: {error}; mend it") from None
        elif self.division not in DIVISIONS:
            raise ConfigError(
                f"documents {self.division!r} is unknown{did_you_mean(self.division, DIVISIONS)}, or give a regular "
                "expression that begins with ^"
            )

    def split(self, text: str) -> list[str]:
        """The documents of whole lines, where a regular expression says with which lines they begin.

        >>> DocumentForm("^[0-9]+:").split("1: In the\\nbeginning\\n2: And")
        ['1: In the\\nbeginning\\n', '2: And']
        """
        documents = [""]
        for line in text.splitlines(keepends=True):
            if re.match(self.division, line):
                documents.append(line)
            else:
                documents[-1] += line
        return documents if documents[0] else documents[1:]


@dataclass(frozen=True)
class Block:
    """Some documents of a file, one after another. line: the number of the first line (Parquet: row), from 1."""

    path: Path
    line: int
    kind: Literal["text", "json", "parquet"]
    form: DocumentForm
    payload: Any

    def texts(self) -> tuple[list[str], list[tuple[str, str, str]]]:
        """(the documents that are not empty, what BadLines.leave_out is to be told)."""
        bad = _Report()
        if self.kind == "parquet":
            texts = list(self._cells(bad))
        elif self.kind == "json":
            texts = list(self._objects(bad))
        else:
            texts = self._pieces(decode(self.payload, self.path, self.line, bad))
        return [text for text in texts if text.strip()], bad.lines

    def _pieces(self, text: str) -> list[str]:
        if self.form.division == "line":
            return text.split("\n")
        if self.form.division == "paragraph":
            return [piece.strip("\r\n") for piece in re.split(r"\n[ \t\r]*\n", text)]
        if self.form.division.startswith("^"):
            return [piece.strip("\r\n") for piece in self.form.split(text)]
        return [text]

    def _objects(self, bad: _Report) -> Iterator[str]:
        for line, row in enumerate(self.payload.split(b"\n"), self.line):
            if not row.strip():
                continue
            place = f"{self.path}:{line}"
            try:
                value = json.loads(row)
            except (ValueError, RecursionError) as error:
                bad.leave_out(place, f"not JSON ({error})", "mend it")
                continue
            text = value.get(self.form.key) if isinstance(value, dict) else None
            if isinstance(text, str) and _is_text(text):
                yield text
            elif isinstance(text, str):
                bad.leave_out(
                    place, f"{self.form.key!r} has half of a surrogate pair, which is no character", "mend it"
                )
            elif isinstance(value, dict):
                got = type(text).__name__ if self.form.key in value else f"keys {', '.join(map(repr, value)) or 'none'}"
                bad.leave_out(place, f"no text under {self.form.key!r}, but {got}", "give the key that has the text")
            else:
                bad.leave_out(place, f"a {type(value).__name__}, not an object", "write one object a line")

    def _cells(self, bad: _Report) -> Iterator[str]:
        for row, text in enumerate(self.payload, self.line):
            if isinstance(text, str):
                yield text
            else:
                bad.leave_out(f"{self.path}: row {row}", f"{self.form.key!r} is empty (null)", "fill it")


@dataclass
class _Report:
    """Lines to be left out, kept for the process that counts them."""

    lines: list[tuple[str, str, str]] = field(default_factory=list)

    def leave_out(self, line: str, why: str, cure: str) -> None:
        self.lines.append((line, why, cure))


def read_blocks(path: Path, form: DocumentForm, bad: BadLines) -> Iterator[Block]:
    """The documents of a file in blocks; how it lies is what its name ends in, before .gz or .zst.

    Raises ConfigError for another ending, DataError for a file that is missing or damaged, and a document of a text
    file of over 64 MiB.
    """
    kind = kind_of(path)
    if not path.is_file():
        raise DataError(f"{path}: {'a folder, not a file' if path.is_dir() else 'no such file'}; give files of text")
    if kind == "parquet":
        for row, cells in read_columns(path, form.key):
            yield Block(path, row, kind, form, cells)
        return
    blocks = line_blocks(path, bad)
    if kind == "text" and form.division != "line":
        blocks = _cut_at_documents(path, blocks, form.division)
    for line, data in blocks:
        yield Block(path, line, kind, form, data)


def kind_of(path: Path) -> Literal["text", "json", "parquet"]:
    """The kind of a file's content by its name. Raises ConfigError for an ending that says nothing."""
    inner = path.with_suffix("") if path.suffix in COMPRESSED else path
    kind = _ENDINGS.get(inner.suffix.lower())
    if kind is None or (kind == "parquet" and inner is not path):
        known = f"{', '.join(_ENDINGS)}, each but .parquet also before {' or '.join(COMPRESSED)}"
        raise ConfigError(f"{path}: the name does not say what the file holds; end it with one of {known}")
    return kind  # type: ignore[return-value]


def holds_rows(path: Path) -> bool:
    """Whether a name says that a file holds objects, as JSON or Parquet does."""
    inner = path.with_suffix("") if path.suffix in COMPRESSED else path
    return _ENDINGS.get(inner.suffix.lower(), "text") != "text"


def _cut_at_documents(path: Path, blocks: Iterator[tuple[int, bytes]], division: str) -> Iterator[tuple[int, bytes]]:
    """Blocks cut where a document ends."""
    line, rest, first = 1, b"", True
    for begin, data in blocks:
        line, first = (begin, False) if first or not rest else (line, False)
        rest += data
        cut = 0
        if division == "paragraph":
            for match in _BLANK_LINE.finditer(rest):
                cut = match.end()
        elif division.startswith("^"):
            cut = _last_line(rest, division)
        if cut:
            yield line, rest[:cut]
            line, rest = line + rest[:cut].count(b"\n"), rest[cut:]
        if len(rest) > _MAX_DOCUMENT_BYTES:
            other = "line" if division != "file" else "paragraph or line"
            raise DataError(
                f"{path}:{line}: a document of over {_MAX_DOCUMENT_BYTES:,} bytes, with documents={division}; break it "
                f"up, or set documents to {other}"
            )
    if rest:
        yield line, rest


def _last_line(data: bytes, pattern: str) -> int:
    """The start of the last line that a pattern matches; 0 if none but the first does."""
    end = len(data)
    while (begin := data.rfind(b"\n", 0, end) + 1) > 0:
        if re.match(pattern, data[begin:end].decode(errors="replace")):
            return begin
        end = begin - 1
    return 0


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
