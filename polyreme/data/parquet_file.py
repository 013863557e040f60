"""Columns and rows of Parquet files, read with pyarrow where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from polyreme.errors import ConfigError, DataError, did_you_mean

_ROWS = 1024


def read_columns(path: Path, key: str) -> Iterator[tuple[int, list[Any]]]:
    """(number of the first row, from 1; the cells) of a column of text, some rows at a time; a missing cell is None.

    Raises ConfigError without pyarrow, DataError for a damaged file and a column that is missing or of another type.
    """
    with _opened(path) as (library, file):
        names = file.schema_arrow.names
        if key not in names:
            raise DataError(f"{path}: no column {key!r}{did_you_mean(key, names)}")
        kind = file.schema_arrow.field(key).type
        if not (library.types.is_string(kind) or library.types.is_large_string(kind)):
            raise DataError(f"{path}: column {key!r} is of {kind}, not of text; give one of strings")
        row = 1
        for batch in file.iter_batches(batch_size=_ROWS, columns=[key]):
            yield row, batch.column(0).to_pylist()
            row += batch.num_rows


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number of the row, from 1; its cells by column). Raises as read_columns does."""
    row = 0
    with _opened(path) as (_, file):
        for batch in file.iter_batches(batch_size=_ROWS):
            for cells in batch.to_pylist():
                row += 1
                yield row, cells


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """(pyarrow, the open file); what is wrong with the file while it is read is a DataError."""
    try:
        parquet, library = import_module("pyarrow.parquet"), import_module("pyarrow")
    except ImportError:
        raise ConfigError(f"{path}: Parquet files are read with pyarrow: pip install polyreme[data]") from None
    try:
        with parquet.ParquetFile(path) as file:
            yield library, file
    except (library.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from None
