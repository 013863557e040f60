"""MmapStorage: parts of a file of numbers as Tensors, without reading the rest of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import DataError, ShapeError


class MmapStorage:
    """The first nbytes of a file, mapped into memory: pages are read when they are asked for.

    Raises DataError if the file is not there or is shorter.
    """

    def __init__(self, filename: str, nbytes: int) -> None:
        path = Path(filename)
        if not path.is_file() or path.stat().st_size < nbytes:
            have = f"has {path.stat().st_size} bytes" if path.is_file() else "is not a file"
            raise DataError(f"MmapStorage: {path} {have}, {nbytes} were asked for")
        self._bytes = np.memmap(path, np.uint8, "r", shape=(nbytes,)) if nbytes else np.empty(0, np.uint8)

    def get_slice(self, dtype: Any = "uint8", start: int = 0, stop: int | None = None, step: int = 1) -> Tensor:
        """Elements start to stop of the file as an array of dtype -> [ceil((stop - start) / step)], copied.

        Raises ShapeError for elements that are not there.
        """
        to = dtypes.as_dtype(dtype)
        count = self._bytes.size // to.itemsize
        stop = count if stop is None else stop
        if not 0 <= start <= stop <= count or step < 1:
            raise ShapeError(
                f"MmapStorage.get_slice: elements {start} to {stop} in steps of {step}; there are {count} of {to.name}"
            )
        return to_tensor(self._bytes[: count * to.itemsize].view(to)[start:stop:step])


__all__ = ["MmapStorage"]
