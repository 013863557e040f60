"""DataLoader.from_generator and PyReader: minibatches from Python generators, iterated over or read by the Program.

One that is not iterable is started, read by every Executor.run of a Program with its Variables until
EOFException, and reset.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from polyreme import reader as readers
from polyreme.core.devices.place import as_place
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, DataError, ProgramError
from polyreme.fluid.data_feeder import DataFeeder
from polyreme.fluid.dataset import DatasetBase
from polyreme.fluid.mode import in_dygraph_mode
from polyreme.program.program import Program


class EOFException(Exception):
    """A loader that feeds a Program has no more batches; call its reset()."""


class GeneratorLoader:
    """Feeds made from a generator, read ahead in a thread if capacity says how many."""

    def __init__(
        self, feed_list: Sequence[Any] | None, capacity: int | None, iterable: bool, return_list: bool
    ) -> None:
        self._dygraph = in_dygraph_mode()
        if self._dygraph and not iterable:
            raise ConfigError("DataLoader.from_generator: iterable=False reads into a Program; dygraph has none")
        if not self._dygraph and not feed_list:
            raise ConfigError("DataLoader.from_generator: give feed_list, the Variables that are fed")
        self._variables = list(feed_list or ())
        self._capacity = capacity
        self.iterable = iterable
        self._lists = return_list or self._dygraph
        self._batches: Callable[[], Iterable[Any]] | None = None
        self._places: list[Any] = []
        self._reading: Iterator[Any] | None = None
        if not iterable:
            for v in self._variables:
                v.loader = self

    # where batches come from

    def set_sample_generator(
        self, reader: Callable[[], Iterable[Any]], batch_size: int, drop_last: bool = True, places: Any = None
    ) -> GeneratorLoader:
        """Take single samples, tuples of parts."""
        return self.set_sample_list_generator(readers.batch(reader, batch_size, drop_last), places)

    def set_sample_list_generator(self, reader: Callable[[], Iterable[Any]], places: Any = None) -> GeneratorLoader:
        """Take lists of samples."""

        def feeds() -> Iterator[Any]:
            for samples in reader():
                yield self._columns(samples)

        return self._take(feeds, places)

    def set_batch_generator(self, reader: Callable[[], Iterable[Any]], places: Any = None) -> GeneratorLoader:
        """Take whole minibatches: arrays or LoDTensors, one for each Variable."""

        def feeds() -> Iterator[Any]:
            for arrays in reader():
                listed = list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]
                if self._variables and len(listed) != len(self._variables):
                    raise DataError(
                        f"DataLoader: {len(listed)} arrays in a minibatch for {len(self._variables)} Variables"
                    )
                yield listed

        return self._take(feeds, places)

    decorate_sample_generator = set_sample_generator
    decorate_sample_list_generator = set_sample_list_generator
    decorate_batch_generator = set_batch_generator

    def _take(self, feeds: Callable[[], Iterable[Any]], places: Any) -> GeneratorLoader:
        if self.iterable and places is None and not self._dygraph:
            raise ConfigError("DataLoader: iterable=True needs places=, such as fluid.cpu_places()")
        given = places if isinstance(places, (list, tuple)) else [] if places is None else [places]
        self._places = [as_place(p) for p in given]
        self._batches = feeds if not self._capacity else readers.buffered(feeds, self._capacity)
        return self

    def _columns(self, samples: Any) -> list[Any]:
        if self._variables:
            feed = DataFeeder(self._variables, self._places[0] if self._places else "cpu").feed(samples)
            return [feed[v.name] for v in self._variables]
        return [np.stack([np.asarray(p) for p in part]) for part in zip(*samples, strict=True)]

    def _ready(self) -> Callable[[], Iterable[Any]]:
        if self._batches is None:
            raise DataError("DataLoader: no generator is set; call set_batch_generator or one of its like")
        return self._batches

    # an iterable one

    def __iter__(self) -> Iterator[Any]:
        """Lists with a feed for each place, a dict or with return_list a list; in dygraph lists of Tensors."""
        if not self.iterable:
            raise ProgramError("DataLoader: iterable=False; use start(), Executor.run until EOFException, reset()")
        count = max(1, len(self._places))
        for group in readers.batch(self._ready(), count, drop_last=True)():
            made = [self._batch(columns) for columns in group]
            yield made[0] if self._dygraph and count == 1 else made

    def _batch(self, columns: list[Any]) -> Any:
        if self._dygraph:
            return [to_tensor(np.asarray(c)) for c in columns]
        named = {v.name: c for v, c in zip(self._variables, columns, strict=True)}
        return list(named.values()) if self._lists else named

    def __call__(self) -> Iterator[Any]:
        """iter() of it."""
        return iter(self)

    # one that a Program reads

    def start(self) -> None:
        """Begin an epoch. Raises ProgramError for an iterable loader, and before reset()."""
        if self.iterable:
            raise ProgramError("DataLoader.start: this one is iterable; write `for feed in loader():`")
        if self._reading is not None:
            raise ProgramError("DataLoader.start: it is started; call reset() at the end of an epoch")
        self._reading = iter(self._ready()())

    def reset(self) -> None:
        """End an epoch."""
        if isinstance(self._reading, Generator):
            self._reading.close()
        self._reading = None

    def next(self) -> dict[str, Any]:
        """The next feed. Raises EOFException at the end, ProgramError before start()."""
        if self._reading is None:
            raise ProgramError("Executor.run: the Program's DataLoader is not started; call its start()")
        columns = next(self._reading, None)
        if columns is None:
            raise EOFException("the DataLoader has no more minibatches; call its reset(), then start() again")
        return {v.name: c for v, c in zip(self._variables, columns, strict=True)}


def feed_of(program: Any, feed: Any) -> Any:
    """feed with what the Program's started loaders give."""
    if not isinstance(program, Program):
        return feed
    found = (getattr(v, "loader", None) for v in program.list_vars())
    for loader in {id(f): f for f in found if isinstance(f, GeneratorLoader)}.values():
        if not isinstance(feed, Mapping) or not all(v.name in feed for v in loader._variables):
            feed = {**(feed or {}), **loader.next()}
    return feed


class DataLoader:
    """Makes loaders."""

    @staticmethod
    def from_generator(
        feed_list: Sequence[Any] | None = None, capacity: int | None = None, use_double_buffer: bool = True,
        iterable: bool = True, return_list: bool = False, use_multiprocess: bool = False,
    ) -> GeneratorLoader:  # fmt: skip
        """A loader of what a generator gives: set it by set_sample_generator, set_sample_list_generator or
        set_batch_generator.

        capacity: how many minibatches are read ahead, in a thread. use_double_buffer, use_multiprocess: they change
        when, not what is read; reading ahead is what capacity says.
        """
        return GeneratorLoader(feed_list, capacity, iterable, return_list)

    @staticmethod
    def from_dataset(dataset: DatasetBase, places: Any, drop_last: bool = True) -> GeneratorLoader:
        """A loader of a dataset of fluid.dataset, iterated over: a feed for each minibatch, a list of them for places.

        drop_last: leave out a last minibatch that is smaller.
        """
        loader = GeneratorLoader(dataset.variables, None, True, False)
        return loader.set_batch_generator(lambda: (list(f.values()) for f in dataset.feeds(drop_last)), places)


class PyReader(GeneratorLoader):
    """DataLoader.from_generator as a class."""

    def __init__(
        self, feed_list: Sequence[Any] | None = None, capacity: int | None = None, use_double_buffer: bool = True,
        iterable: bool = True, return_list: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(feed_list, capacity, iterable, return_list)

    @property
    def variables(self) -> list[Any]:
        """What is fed."""
        return list(self._variables)

    decorate_paddle_reader = GeneratorLoader.set_sample_list_generator
    decorate_tensor_provider = GeneratorLoader.set_batch_generator


__all__ = ["DataLoader", "EOFException", "PyReader"]
