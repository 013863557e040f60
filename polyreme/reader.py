"""Readers, functions without parameters that return an iterator over samples, and what makes readers of readers."""

from __future__ import annotations

import itertools
import queue
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from polyreme.errors import ConfigError, DataError

Reader = Callable[[], Iterable[Any]]


def _count(what: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{what}: {name}={value!r}; give an int of at least 1")
    return value


def batch(reader: Reader, batch_size: int, drop_last: bool = False) -> Reader:
    """Lists of batch_size samples, the last one shorter unless drop_last leaves it out.

    >>> list(batch(lambda: range(5), 2)())
    [[0, 1], [2, 3], [4]]
    """
    size = _count("batch", "batch_size", batch_size)

    def batches() -> Iterator[list[Any]]:
        samples = iter(reader())
        while len(found := list(itertools.islice(samples, size))) == size or (found and not drop_last):
            yield found

    return batches


def shuffle(reader: Reader, buf_size: int) -> Reader:
    """Samples in random order, each buf_size of them among themselves, by Python's random."""
    size = _count("shuffle", "buf_size", buf_size)

    def shuffled() -> Iterator[Any]:
        for part in batch(reader, size)():
            random.shuffle(part)
            yield from part

    return shuffled


def map_readers(func: Callable[..., Any], *readers: Reader) -> Reader:
    """func of a sample of each reader, until one ends."""
    return lambda: map(func, *(r() for r in readers))


def chain(*readers: Reader) -> Reader:
    """One reader after the other."""
    return lambda: itertools.chain(*(r() for r in readers))


def compose(*readers: Reader, check_alignment: bool = True) -> Reader:
    """Tuples of a sample of each reader, tuples among them taken apart.

    Raises DataError for readers of different lengths; without check_alignment it ends with the shortest.
    """

    def parts(sample: Any) -> tuple:
        return sample if isinstance(sample, tuple) else (sample,)

    def composed() -> Iterator[tuple]:
        missing = object()
        for samples in itertools.zip_longest(*(r() for r in readers), fillvalue=missing):
            if any(s is missing for s in samples):
                if check_alignment:
                    raise DataError("compose: the readers have different lengths; check_alignment=False allows that")
                return
            yield sum((parts(s) for s in samples), ())

    return composed


def firstn(reader: Reader, n: int) -> Reader:
    """The first n samples."""
    return lambda: itertools.islice(reader(), n)


def cache(reader: Reader) -> Reader:
    """Samples kept in memory: reader is read once, now."""
    samples = tuple(reader())
    return lambda: iter(samples)


_END = object()


def buffered(reader: Reader, size: int) -> Reader:
    """Samples read ahead, up to size of them, in a thread. What reader raises is raised where it is read."""
    room = _count("buffered", "size", size)

    def read() -> Iterator[Any]:
        ahead: queue.Queue = queue.Queue(room)
        stopped = threading.Event()

        def put(item: Any) -> bool:
            while not stopped.is_set():
                try:
                    ahead.put(item, timeout=0.1)
                    return True
                except queue.Full:
                    continue
            return False

        def fill() -> None:
            try:
                for sample in reader():
                    if not put((sample, None)):
                        return
                put((_END, None))
            except Exception as error:  # noqa: BLE001  whatever it is, the reading thread raises it
                put((_END, error))

        threading.Thread(target=fill, daemon=True).start()
        try:
            while (found := ahead.get())[0] is not _END:
                yield found[0]
            if found[1] is not None:
                raise found[1]
        finally:
            stopped.set()

    return read


def xmap_readers(
    mapper: Callable[[Any], Any], reader: Reader, process_num: int, buffer_size: int, order: bool = False
) -> Reader:
    """mapper of each sample, computed by process_num threads, up to buffer_size ahead.

    Samples stay in order, whether order says so or not.
    """
    workers, room = (
        _count("xmap_readers", "process_num", process_num),
        _count("xmap_readers", "buffer_size", buffer_size),
    )

    def mapped() -> Iterator[Any]:
        samples = iter(reader())
        with ThreadPoolExecutor(workers) as pool:
            waiting = [pool.submit(mapper, s) for s in itertools.islice(samples, room)]
            while waiting:
                done = waiting.pop(0).result()
                waiting += [pool.submit(mapper, s) for s in itertools.islice(samples, 1)]
                yield done

    return mapped


__all__ = ["batch", "buffered", "cache", "chain", "compose", "firstn", "map_readers", "shuffle", "xmap_readers"]
