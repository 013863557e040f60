"""How a dataset reaches the workers: pickled once, its arrays in one shared segment, memory-mapped files by name.

These bytes go from a process to the children it started, never to or from a file.

What a worker cannot import (the script's own classes and functions, local ones, lambdas) travels by value, so that no
worker runs the script again. On the way back, in batches, such a definition is a number, and the parent gets its own.
"""

import inspect
import io
import mmap
import pickle
import sys
import threading
import types
from collections import ChainMap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import shared_memory
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import cloudpickle
import numpy as np

from polyreme.errors import DataError
from polyreme.io.shared import create

_PARTS = ("dataset", "collate_fn", "worker_init_fn")
# a worker is alone in its process: a lock of its own does what a forked one would
_MADE_ANEW = {type(make()): make for make in (threading.Lock, threading.RLock)}


class _Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar[Any] = ChainMap(
        dict.fromkeys(_MADE_ANEW, lambda value: (_MADE_ANEW[type(value)], ())),
        cloudpickle.Pickler.dispatch_table,
        ForkingPickler(io.BytesIO()).dispatch_table,
    )

    def __init__(self, file: Any, buffer_callback: Any = None) -> None:
        super().__init__(file, 5, buffer_callback)
        self.definitions: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.ndarray):
            return _by_name(obj) or NotImplemented
        reduced = super().reducer_override(obj)
        if reduced is not NotImplemented:
            self.definitions.append(obj)
        return reduced


class _ReplyPickler(ForkingPickler):
    def __init__(self, file: Any, numbers: dict[int, int]) -> None:
        super().__init__(file)
        self._numbers = numbers

    def persistent_id(self, obj: Any) -> int | None:
        return self._numbers.get(id(obj)) if isinstance(obj, (type, types.FunctionType)) else None


class Definitions:
    """Classes and functions that went to the workers by value, in the same order on both sides."""

    def __init__(self, members: Sequence[Any]) -> None:
        self._members = members
        self._numbers = {id(member): number for number, member in enumerate(members)}

    def dumps(self, reply: Any) -> Any:
        """The pickle of what a worker sends; a definition in it is its number."""
        if not self._members:
            return ForkingPickler.dumps(reply)
        out = io.BytesIO()
        _ReplyPickler(out, self._numbers).dump(reply)
        return out.getbuffer()

    def loads(self, data: bytes) -> Any:
        """What `dumps` made the pickle of, with the definitions of this side."""
        unpickler: Any = pickle.Unpickler(io.BytesIO(data))
        unpickler.persistent_load = self._members.__getitem__
        return unpickler.load()


@dataclass(frozen=True)
class Shipment:
    """An object on its way: its pickle, and where its arrays lie in the segment `name`, as (offset, bytes)."""

    pickled: bytes
    name: str | None
    parts: tuple[tuple[int, int], ...]

    def open(self) -> tuple[Any, Definitions, shared_memory.SharedMemory | None]:
        """The object, what came by value with it, and the segment, into which its arrays look: keep it as long."""
        memory, buffers = None, []
        if self.name is not None:
            memory = shared_memory.SharedMemory(self.name)
            view = np.ndarray(memory.size, np.uint8, memory.buf)
            view.flags.writeable = False
            buffers = [view[offset : offset + nbytes] for offset, nbytes in self.parts]
        content, definitions = pickle.loads(self.pickled, buffers=buffers)
        return content, Definitions(definitions), memory


def pack(
    content: tuple[Any, ...], name: str, use_shared_memory: bool
) -> tuple[Shipment, Definitions, shared_memory.SharedMemory | None]:
    """The shipment of (dataset, collate_fn, worker_init_fn), what goes by value in it, and the segment that it owns,
    called name, if there are arrays to share.

    Workers see the arrays read-only, since they all look at the same memory; with use_shared_memory=False each gets a
    copy. Read-only numpy.memmap arrays are opened again from their file. Raises DataError that names what cannot be
    pickled.
    """
    buffers: list[Any] = []
    out = io.BytesIO()
    # protocol 5 hands contiguous arrays to the callback instead of copying them into the pickle
    pickler = _Pickler(out, buffers.append if use_shared_memory else None)
    try:
        # the list fills while content is pickled; its own turn is last, when all in it is known
        _dump(pickler, (content, pickler.definitions))
    except Exception as error:
        place, value = _culprit(content)
        raise DataError(
            f"DataLoader: worker processes get a copy of {place}, a {type(value).__name__}, which cannot be pickled "
            f"({type(error).__name__}: {error}); make it in worker_init_fn or when it is first used, or set "
            "num_workers=0"
        ) from error
    definitions = Definitions(pickler.definitions)
    raws = [buffer.raw() for buffer in buffers]
    if not raws:
        return Shipment(out.getvalue(), None, ()), definitions, None
    parts, nbytes = [], 0
    for raw in raws:
        parts.append((nbytes, raw.nbytes))
        nbytes += -(-raw.nbytes // 64) * 64
    memory = create(name, nbytes)
    view = np.ndarray(memory.size, np.uint8, memory.buf)
    for (offset, size), raw in zip(parts, raws, strict=True):
        view[offset : offset + size] = raw
    return Shipment(out.getvalue(), memory.name, tuple(parts)), definitions, memory


def _dump(pickler: _Pickler, content: Any) -> None:
    # what the script is called in a process that multiprocessing started; cloudpickle knows it as __main__ only
    script = sys.modules.get("__mp_main__")
    if script is None or script.__name__ != "__mp_main__":
        pickler.dump(content)
        return
    cloudpickle.register_pickle_by_value(script)
    try:
        pickler.dump(content)
    finally:
        cloudpickle.unregister_pickle_by_value(script)


def _culprit(content: tuple) -> tuple[str, Any]:
    """The innermost part of content that cannot be pickled, as (where it is, the part)."""
    place, value = "what they are given", content
    parts: Iterator[tuple[str, Any]] = zip(_PARTS, content, strict=True)
    for _ in range(_DEPTH):
        inner = next(((name, part) for name, part in parts if not _packs(part)), None)
        if inner is None:
            break
        place, value = inner if value is content else (f"{inner[0]} of {place}", inner[1])
        parts = _inside(value)
    return place, value


_DEPTH = 8  # parts inside parts to look at; a cycle would never end


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, types.FunctionType):
        reached = inspect.getclosurevars(value)
        yield from {**reached.globals, **reached.nonlocals}.items()
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, type):
        yield from ((name, part) for name, part in vars(value).items() if name not in ("__dict__", "__weakref__"))
    else:
        yield from list(getattr(value, "__dict__", {}).items())
        yield type(value).__name__, type(value)


def _packs(value: Any) -> bool:
    try:
        _dump(_Pickler(io.BytesIO(), [].append), value)
    except Exception:  # noqa: BLE001  (pickling calls the user's classes)
        return False
    return True


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
