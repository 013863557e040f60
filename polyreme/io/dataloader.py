"""DataLoader: batches of a dataset as Tensors, read here or by worker processes, resumable exactly.

The parent's side; workers never import this file.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from polyreme.errors import ArgumentTypeError, ConfigError, DataError
from polyreme.io.batch_sampler import BatchSampler, check_batch_size
from polyreme.io.border import to_tensors
from polyreme.io.collate import default_collate_fn, default_convert_fn
from polyreme.io.dataset import IterableDataset
from polyreme.io.epoch import Epoch, InProcess, InWorkers, Position
from polyreme.io.fetch import Fetcher, LeftOut, MapFetcher, StreamFetcher
from polyreme.io.pool import PoolOptions, WorkerPool
from polyreme.io.sampler import RandomSampler, SequenceSampler
from polyreme.io.seed import seed_of
from polyreme.io.worker import BatchRequest
from polyreme.keyword_names import NamesKeywords

_STATE_VERSION = 1


class DataLoader(NamesKeywords):
    """Iterates over a dataset in batches of Tensors.

    num_workers processes read ahead, prefetch_factor batches each, and hand batches over through shared memory
    (use_shared_memory=False: through a pipe) in the order of the sampler. Up to reader_buffer_size batches that have
    arrived are made Tensors ahead of time when use_buffer_reader; with num_workers=0 nothing is read ahead. timeout is
    in seconds to wait for one batch; with 0 a worker counts as hung after 30 minutes without a sample read
    (POLYREME_LOADER_STALL, in seconds, 0 for never). persistent_workers keeps the processes from epoch to epoch. places
    is where the Tensors go: one place. With feed_list, return_list=False gives [{name: Tensor}], for an Executor.

    Worker processes get the dataset, collate_fn and worker_init_fn pickled; what the script, a notebook or a function
    defines goes by value, with the globals it reads. The script is not run again and needs no `__main__` guard.
    Datasets see their arrays read-only; ops they call run on the CPU. What cannot be pickled is named in a DataError.
    Without a worker_init_fn numpy's and Python's global generators are seeded for each batch from (seed, epoch, batch).

    An exception in the dataset or in collation is raised as DataError, with the sample and the original as its cause.
    With skip_bad up to so many samples of a pass that cannot be read are logged and left out, their batches shorter.
    state_dict() and set_state_dict() continue with the next undelivered batch, whatever num_workers is then.
    """

    def __init__(
        self,
        dataset: Any,
        feed_list: Sequence[Any] | None = None,
        places: Any = None,
        return_list: bool = True,
        batch_sampler: Any = None,
        batch_size: int | None = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
        use_buffer_reader: bool = True,
        reader_buffer_size: int = 2,
        prefetch_factor: int = 2,
        use_shared_memory: bool = True,
        timeout: float = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        persistent_workers: bool = False,
        skip_bad: int = 0,
    ) -> None:
        if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__getitem__"):
            raise ArgumentTypeError(
                f"DataLoader: dataset is a {type(dataset).__name__}; give a Dataset, an IterableDataset or a list"
            )
        self.dataset = dataset
        self.feed_list = feed_list
        self.return_list = return_list
        self._names = _names(feed_list)
        self.places = places
        self._place = _one_place(places)
        self._stream = isinstance(dataset, IterableDataset)
        self._bare = batch_size is None
        _check_batching(self._stream, batch_sampler, batch_size, shuffle, drop_last)
        self.batch_size: int | Any | None = (
            batch_size if batch_sampler is None else getattr(batch_sampler, "batch_size", None)
        )
        self.drop_last = drop_last
        self.batch_sampler: Any = batch_sampler
        if batch_sampler is None and not self._stream and batch_size is not None:
            self.batch_sampler = BatchSampler(dataset, None, shuffle, batch_size, drop_last)
        self._order: Any = self.batch_sampler
        if self._bare and not self._stream:
            self._order = RandomSampler(dataset) if shuffle else SequenceSampler(dataset)
        self.collate_fn: Callable[[Any], Any] = collate_fn or (default_convert_fn if self._bare else default_collate_fn)
        self.num_workers: int = _check_count("num_workers", num_workers, 0)
        self.use_buffer_reader = use_buffer_reader
        self.reader_buffer_size: int = _check_count("reader_buffer_size", reader_buffer_size, 1)
        self.prefetch_factor: int = _check_count("prefetch_factor", prefetch_factor, 1)
        self.use_shared_memory = use_shared_memory
        self.timeout: float = _seconds(timeout)
        self.worker_init_fn = worker_init_fn
        self.skip_bad: int = _check_count("skip_bad", skip_bad, 0)
        if skip_bad and (self._stream or batch_size is None):
            raise ConfigError(
                f"DataLoader: skip_bad={skip_bad} needs samples with an index, in batches; a stream leaves out in its "
                "own __iter__ what it cannot read"
            )
        self._left_out = LeftOut(self.skip_bad)
        if persistent_workers and not num_workers:
            raise ConfigError("DataLoader: persistent_workers=True needs num_workers of at least 1, got 0")
        self.persistent_workers = persistent_workers
        if not self._stream and batch_sampler is None and len(self._order) == 0:
            raise self._no_batches()
        self._source = _epoch_source(self._order)
        self._seed = self._source.seed if hasattr(self._source, "seed") else seed_of(None, "DataLoader")
        self._own_epoch = 0  # counts for orders that do not
        self._skip = Position(0, 0)  # where a restored state goes on
        self._recent: dict[int, Any] = {}
        self._pool: WorkerPool | None = None
        self._active: Epoch | None = None

    def __len__(self) -> int:
        """Batches per epoch."""
        if self._stream:
            raise TypeError("DataLoader: an IterableDataset has no length; iterate to its end")
        return len(self._order)

    def __call__(self) -> Iterator[Any]:
        """The same as iter(loader)."""
        return iter(self)

    def __iter__(self) -> Iterator[Any]:
        """Start an epoch, from the restored position if there is one."""
        if self._active is not None and self.persistent_workers:
            self._active.close("a newer iteration over the same persistent workers has begun")
        start = self._next_position()
        self._left_out.count = 0
        tasks = self._tasks(start.batches)
        room = self.reader_buffer_size if self.use_buffer_reader else 0
        if self.num_workers:
            pool = self._workers()
            pool.begin(start.epoch, tasks)
            source = InWorkers(pool, self._convert, keep=self.persistent_workers)
        else:
            source = InProcess(self._fetcher(), tasks, self._convert, self._left_out)
        self._active = Epoch(source, start, room, self._no_batches)
        return self._active

    @property
    def epoch(self) -> int:
        """The epoch being read; between epochs the next one."""
        return self._here().epoch

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is, in plain numbers; taken at any time between batches."""
        here = self._here()
        progress = {"epoch": here.epoch, "batches": here.batches, "seed": self._seed}
        return {"version": _STATE_VERSION, **progress, **self._identity()}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration go on after the last batch that was delivered when the state was taken.

        num_workers may differ, except for an IterableDataset, which its workers share. A batch_sampler of the user's
        must give the same order again. Raises ConfigError when the state does not fit this loader.
        """
        self._check_state(state)
        if self._active is not None:
            self._active.close("set_state_dict has moved the loader elsewhere")
            self._active = None
        if self._pool is not None:  # its workers were started with the old seed
            self._pool.close()
        self._seed = state["seed"]
        self._own_epoch = state["epoch"]
        if self._source is not None:
            self._source.set_epoch(state["epoch"])
            if hasattr(self._source, "seed"):
                self._source.seed = state["seed"]
        self._skip = Position(state["epoch"], state["batches"])

    def _check_state(self, state: dict[str, Any]) -> None:
        if state.get("version") != _STATE_VERSION:
            raise ConfigError(f"DataLoader state has version {state.get('version')}, this one reads {_STATE_VERSION}")
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                raise ConfigError(
                    f"DataLoader state was taken with {name}={state.get(name)}, this loader has {mine}; make the "
                    "loader as it was, or start the epoch anew without the state"
                )

    def _identity(self) -> dict[str, Any]:
        # the order of a stream depends on how many workers share it, that of a sampler does not
        return {
            "samples": None if self._stream else len(self.dataset),
            "batch_size": self.batch_size,
            "stream_readers": max(1, self.num_workers) if self._stream else None,
        }

    def _here(self) -> Position:
        if self._active is not None and not self._active.finished:
            return self._active.position
        epoch = self._own_epoch if self._source is None else self._source.epoch
        return self._skip if self._skip.epoch == epoch else Position(epoch, 0)

    def _next_position(self) -> Position:
        self._active = None
        start = self._here()
        self._own_epoch = start.epoch + 1
        self._skip = Position(start.epoch + 1, 0)
        return start

    def _tasks(self, start: int) -> Iterator[BatchRequest]:
        if self._stream:
            return (BatchRequest(number, self.batch_size, number < start) for number in itertools.count())
        order = enumerate(iter(self._order))  # iter() now: it is what takes the sampler's epoch
        self._recent.clear()
        return self._noted(itertools.islice(order, start, None), start)

    def _noted(self, contents: Iterator[tuple[int, Any]], start: int) -> Iterator[BatchRequest]:
        # as many batches as can be on their way, and some that the caller still looks at
        keep = self.num_workers * self.prefetch_factor + self.reader_buffer_size + 8
        for number, one in contents:
            content = one if self._bare else list(one)
            self._recent[number - start] = content
            self._recent.pop(number - start - keep, None)
            yield BatchRequest(number, content)

    def samples_of(self, batch: int) -> list[int] | None:
        """Sample indices of a batch of this pass, counted from 0 where the pass began; None for one long gone, and for
        streams, whose samples have no index."""
        content = self._recent.get(batch)
        return content if isinstance(content, list) else None

    def _fetcher(self) -> Fetcher:
        if self._stream:
            return StreamFetcher(self.dataset, self.collate_fn, _ignore, self.drop_last)
        return MapFetcher(self.dataset, self.collate_fn, _ignore, self.skip_bad > 0)

    def _workers(self) -> WorkerPool:
        if self._pool is not None and not self._pool.closed:
            return self._pool
        options = PoolOptions(
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor,
            use_shared_memory=self.use_shared_memory,
            timeout=self.timeout,
            seed=self._seed + (getattr(self._source, "local_rank", 0) << 32),  # ranks augment differently
            stream=self._stream,
            drop_last=self.drop_last,
            skips_bad=self.skip_bad > 0,
            # what a worker_init_fn sets up may differ from worker to worker
            is_shared=not self._stream and self.worker_init_fn is None,
        )
        pool = WorkerPool(self.dataset, self.collate_fn, self.worker_init_fn, options, self._left_out)
        self._pool = pool if self.persistent_workers else None
        return pool

    def _convert(self, batch: Any) -> Any:
        tensors = to_tensors(batch, self._place)
        if self._names is None:
            return tensors
        if not isinstance(tensors, (list, tuple)) or len(tensors) != len(self._names):
            got = len(tensors) if isinstance(tensors, (list, tuple)) else type(tensors).__name__
            raise ConfigError(f"DataLoader: feed_list names {len(self._names)} fields {self._names}, a batch has {got}")
        return tensors if self.return_list else [dict(zip(self._names, tensors, strict=True))]

    def _no_batches(self) -> DataError:
        kind = type(self.dataset).__name__
        size = f"batch_size={self.batch_size}, drop_last={self.drop_last}"
        if self._stream:
            return DataError(
                f"DataLoader: the stream of {kind} gave no batch with {size}; check that its data was found"
            )
        return DataError(
            f"DataLoader: {len(self.dataset)} samples of {kind} make no batch with {size}; check that the data was "
            "found, lower batch_size or set drop_last=False"
        )


def _ignore(position: int, sample_id: Any) -> None:
    pass


def _one_place(places: Any) -> Any:
    if not isinstance(places, (list, tuple)):
        return places
    if len(places) != 1:
        raise ConfigError(f"DataLoader: places has {len(places)} entries {places}; give the one that Tensors go to")
    return places[0]


def _names(feed_list: Sequence[Any] | None) -> list[str] | None:
    return None if feed_list is None else [feed if isinstance(feed, str) else feed.name for feed in feed_list]


def _check_batching(stream: bool, batch_sampler: Any, batch_size: Any, shuffle: bool, drop_last: bool) -> None:
    if batch_sampler is not None and (batch_size != 1 or shuffle or drop_last):
        raise ConfigError(
            f"DataLoader: batch_size={batch_size}, shuffle={shuffle}, drop_last={drop_last} have no effect on a given "
            "batch_sampler; set them there"
        )
    if stream and (batch_sampler is not None or shuffle):
        asked = "a batch_sampler" if batch_sampler is not None else "shuffle=True"
        raise ConfigError(f"DataLoader: {asked} cannot reorder an IterableDataset; shuffle in its __iter__")
    if batch_size is None and drop_last:
        raise ConfigError("DataLoader: drop_last=True needs a batch_size, got None")
    if batch_size is not None:
        check_batch_size("DataLoader", batch_size)


def _epoch_source(order: Any) -> Any:
    """The object that counts the epochs of an order: itself, its sampler, or None."""
    for source in (order, getattr(order, "sampler", None)):
        if hasattr(source, "epoch") and hasattr(source, "set_epoch"):
            return source
    return None


def _check_count(name: str, value: Any, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"DataLoader: {name} must be a whole number of at least {low}, got {value!r}")
    return value


def _seconds(timeout: float) -> float:
    if not timeout >= 0:
        raise ConfigError(f"DataLoader: timeout is {timeout} s; give 0 for none or a positive number of seconds")
    return timeout
