"""Records of JSON lines, JSON arrays and Parquet files, each with the file and the line that it stands in."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyreme.data.documents import kind_of
from polyreme.data.parquet_file import read_rows
from polyreme.data.text_files import BadLines, line_blocks
from polyreme.errors import DataError

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Record:
    """An object of a file. place: file:line, of Parquet file: row n, from 1."""

    place: str
    fields: dict[str, Any]


def read_records(path: Path, bad: BadLines) -> Iterator[Record]:
    """The objects of a file: .jsonl, .ndjson, .json (lines or one array), each also .gz or .zst; .parquet.

    bad is told of lines that hold no object. Raises ConfigError for another ending and without the library that a file
    needs, DataError for a file that is missing or damaged.
    """
    kind = kind_of(path)
    if not path.is_file():
        raise DataError(f"{path}: {'a folder, not a file' if path.is_dir() else 'no such file'}; give files of rows")
    if kind == "text":
        raise DataError(f"{path}: a file of text, which has no rows; give .jsonl, .json or .parquet")
    if kind == "parquet":
        for row, cells in read_rows(path):
            # a column that a row does not fill is there all the same
            yield Record(f"{path}: row {row}", _drop_filled_keys(cells))
        return
    yield from _of_json(path, bad)


def _of_json(path: Path, bad: BadLines) -> Iterator[Record]:
    blocks = line_blocks(path, bad)
    for line, block in blocks:
        if line == 1 and block.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
            whole = b"".join([block, *(rest for _, rest in blocks)])
            try:
                text = whole.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                number = whole.count(b"\n", 0, error.start) + 1
                raise DataError(f"{path}:{number}: not UTF-8 ({error.reason}); convert the file to UTF-8") from None
            yield from _of_array(path, text)
            return
        for number, row in enumerate(block.split(b"\n"), line):
            if row.strip():
                yield from _of_line(f"{path}:{number}", row, bad)


def _of_line(place: str, row: bytes, bad: BadLines) -> Iterator[Record]:
    try:
        value = json.loads(row)
    except (ValueError, RecursionError) as error:
        bad.leave_out(place, f"not JSON ({error})", "mend it")
        return
    if isinstance(value, dict):
        yield Record(place, value)
    else:
        bad.leave_out(place, f"a {type(value).__name__}, not an object", "write one object a line")


def _of_array(path: Path, text: str) -> Iterator[Record]:
    """Objects of one array, each with the line that it begins in."""
    decoder, line, counted = json.JSONDecoder(), 1, 0
    offset = _after_space(text, text.index("[") + 1)
    while text[offset : offset + 1] != "]":
        line, counted = line + text.count("\n", counted, offset), offset
        place = f"{path}:{line}"
        try:
            value, offset = decoder.raw_decode(text, offset)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: not JSON ({error}); mend the file") from None
        if not isinstance(value, dict):
            raise DataError(f"{place}: a {type(value).__name__} in the array, not an object; write objects")
        yield Record(place, value)
        offset = _after_space(text, offset)
        if text[offset : offset + 1] == ",":
            offset = _after_space(text, offset + 1)
        elif text[offset : offset + 1] != "]":
            raise DataError(f"{place}: the array does not go on with , or ] after this object; mend the file")
    if text[offset + 1 :].strip():
        raise DataError(f"{path}: has more after its array; write one array, or objects line by line")


def _after_space(text: str, offset: int) -> int:
    while text[offset : offset + 1] and text[offset] in _SPACE:
        offset += 1
    return offset


def _drop_filled_keys(value: Any) -> Any:
    """A cell without the keys that other rows fill."""
    if isinstance(value, dict):
        return {key: _drop_filled_keys(inner) for key, inner in value.items() if inner is not None}
    return [_drop_filled_keys(inner) for inner in value] if isinstance(value, list) else value
