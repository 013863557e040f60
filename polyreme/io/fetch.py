"""Reading the samples of one batch, the same way in a worker and in the parent."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from polyreme.errors import DataError
from polyreme.io.collate import default_collate_fn, materialize, plan
from polyreme.io.dataset import reader

_log = logging.getLogger("polyreme.io")
END = object()  # what a stream gives in place of a batch once it is exhausted
EMPTY = object()  # what is given in place of a batch none of whose samples could be read


class LeftOut:
    """Counts the samples of a pass that could not be read and were left out: at most `most`."""

    most: int
    count: int

    def __init__(self, most: int) -> None:
        self.most, self.count = most, 0

    def note(self, samples: Sequence[tuple[Any, str]]) -> None:
        """Log each. Raises DataError for the first that is one too many."""
        for sample, why in samples:
            self.count += 1
            if self.count > self.most:
                raise DataError(
                    f"DataLoader: sample {sample} cannot be read: {why}; {self.count} of this pass cannot, and "
                    f"skip_bad={self.most} may be left out: mend the data, or raise skip_bad"
                )
            _log.warning("DataLoader: sample %s left out, %d of at most %d: %s", sample, self.count, self.most, why)


class Fetcher:
    """Reads batches; `position` is the place in the batch of the sample being read, for whoever reports a failure."""

    def __init__(self, collate_fn: Callable[[Any], Any], on_sample: Callable[[int, Any], None]) -> None:
        self._collate_fn = collate_fn
        self._on_sample = on_sample
        self.position = -1
        self.left_out: list[tuple[Any, str]] = []
        """Samples that could not be read since take_left_out, and why."""

    def take_left_out(self) -> tuple[tuple[Any, str], ...]:
        """left_out, which is empty then."""
        taken = tuple(self.left_out)
        self.left_out.clear()
        return taken

    def at(self, position: int, sample_id: Any) -> None:
        """Note that the sample at this position of the batch is about to be read; -1 is collation."""
        self.position: int = position
        self._on_sample(position, sample_id)

    def fetch(self, task: Any, skip: bool) -> Any:
        """The planned batch of a task, or END."""
        raise NotImplementedError(f"{type(self).__name__} does not define fetch")

    def collate(self, samples: list[Any], ids: Sequence[Any]) -> Any:
        """The planned batch: arrays of the default collation are not stacked yet."""
        self.at(-1, -1)
        if self._collate_fn is default_collate_fn:
            return plan(samples, ids)
        return self._collate_fn(samples)


class MapFetcher(Fetcher):
    """Batches of a dataset with an index."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        on_sample: Callable[[int, Any], None],
        skips_bad: bool = False,
    ) -> None:
        super().__init__(collate_fn, on_sample)
        self._read = reader(dataset)
        self._skips_bad = skips_bad

    def fetch(self, task: Any, skip: bool) -> Any:
        """The batch of a list of indices, or the one sample of a single index."""
        if not isinstance(task, list):
            self.at(0, task)
            sample = self._read(task)
            self.at(-1, -1)
            return self._collate_fn(sample)
        samples, ids = [], []
        for position, index in enumerate(task):
            self.at(position, index)
            try:
                samples.append(self._read(index))
            except Exception as error:
                if not self._skips_bad:
                    raise
                self.left_out.append((index, f"{type(error).__name__}: {error}"))
            else:
                ids.append(index)
        return self.collate(samples, ids) if samples else EMPTY


class StreamFetcher(Fetcher):
    """Batches of a stream: as many samples as come, up to the size asked for."""

    def __init__(
        self, dataset: Any, collate_fn: Callable[[Any], Any], on_sample: Callable[[int, Any], None], drop_last: bool
    ) -> None:
        super().__init__(collate_fn, on_sample)
        self._stream: Iterator[Any] = iter(dataset)
        self._drop_last = drop_last
        self._taken = 0

    def fetch(self, task: int | None, skip: bool) -> Any:
        """The next batch of `task` samples (None: one bare sample) or END; skip takes them and gives None."""
        start = self._taken
        samples = []
        for position in range(1 if task is None else task):
            self.at(position, self._taken)
            sample = next(self._stream, END)
            if sample is END:
                break
            self._taken += 1
            samples.append(sample)
        if not samples or (self._drop_last and task is not None and len(samples) < task):
            return END
        if skip:
            return None
        if task is None:
            self.at(-1, -1)
            return self._collate_fn(samples[0])
        return self.collate(samples, range(start, self._taken))


def fetch_whole(fetcher: Fetcher, task: Any, skip: bool) -> Any:
    """fetch, with the arrays of the batch stacked into memory of their own."""
    batch = fetcher.fetch(task, skip)
    return batch if batch is END or batch is EMPTY else materialize(batch)
