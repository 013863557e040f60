"""How a dataset reaches the workers: pickled once, its arrays in one shared segment, memory-mapped files by name."""

import io
import mmap
from dataclasses import dataclass
from multiprocessing import shared_memory
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from polyreme.io.shared import create


class _Pickler(ForkingPickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.ndarray):
            return _by_name(obj) or NotImplemented
        return NotImplemented


@dataclass(frozen=True)
class Shipment:
    """An object on its way: its pickle, and where its arrays lie in the segment `name`, as (offset, bytes)."""

    pickled: bytes
    name: str | None
    parts: tuple[tuple[int, int], ...]

    def open(self) -> tuple[Any, shared_memory.SharedMemory | None]:
        """The object, whose arrays look into the segment, and the segment, which must be kept as long."""
        memory, buffers = None, []
        if self.name is not None:
            memory = shared_memory.SharedMemory(self.name)
            view = np.ndarray(memory.size, np.uint8, memory.buf)
            view.flags.writeable = False
            buffers = [view[offset : offset + nbytes] for offset, nbytes in self.parts]
        # the stubs take loads for a method; it is pickle's function
        return ForkingPickler.loads(self.pickled, buffers=buffers), memory  # pyright: ignore


def pack(content: Any, name: str, use_shared_memory: bool) -> tuple[Shipment, shared_memory.SharedMemory | None]:
    """The shipment of content and the segment that it owns, called name, if there are arrays to share.

    Workers see the arrays read-only, since they all look at the same memory; with use_shared_memory=False each gets a
    copy. Read-only numpy.memmap arrays are opened again from their file.
    """
    buffers: list[Any] = []
    out = io.BytesIO()
    # protocol 5 hands contiguous arrays to the callback instead of copying them into the pickle
    _Pickler(out, 5, True, buffers.append if use_shared_memory else None).dump(content)
    raws = [buffer.raw() for buffer in buffers]
    if not raws:
        return Shipment(out.getvalue(), None, ()), None
    parts, nbytes = [], 0
    for raw in raws:
        parts.append((nbytes, raw.nbytes))
        nbytes += -(-raw.nbytes // 64) * 64
    memory = create(name, nbytes)
    view = np.ndarray(memory.size, np.uint8, memory.buf)
    for (offset, size), raw in zip(parts, raws, strict=True):
        view[offset : offset + size] = raw
    return Shipment(out.getvalue(), memory.name, tuple(parts)), memory


def _by_name(array: np.ndarray) -> tuple | None:
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root, np.memmap) or not isinstance(root.base, mmap.mmap) or root.mode != "r":
        return None
    if root.filename is None or not array.flags.c_contiguous:
        return None
    offset = root.offset + array.ctypes.data - root.ctypes.data
    return np.memmap, (root.filename, array.dtype, "r", offset, array.shape)
