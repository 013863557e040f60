"""Datasets of text files that Executor.train_from_dataset reads: lines of slots, of a number and that many values.

A line has, for each Variable of set_use_var in turn, how many values there are, then the values: "3 11 12 13 1 0" for
a list of three ids and one label. A command may make such lines of files that look otherwise.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.errors import ConfigError, DataError, DTypeError, did_you_mean
from polyreme.sequences.lod_tensor import create_lod_tensor

Row = list[np.ndarray]


def _refuse(name: str, instead: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(f"{type(self).__name__}.{name}: {instead}")

    refuse.__name__ = name
    refuse.__doc__ = f"Raises ConfigError: {instead}."
    return refuse


_NO_SERVER = "there are no parameter servers here, whose tables it fills"


class DatasetBase:
    """Which files, how their lines become minibatches, and of which Variables."""

    def __init__(self) -> None:
        self.batch_size = 1
        self.thread_num = 1
        self.filelist: list[str] = []
        self.pipe_command = "cat"
        self.variables: list[Any] = []

    def set_pipe_command(self, pipe_command: str) -> None:
        """A shell command that makes lines of slots of a file on its standard input; "cat" leaves them as they are."""
        self.pipe_command = pipe_command

    def set_batch_size(self, batch_size: int) -> None:
        """Lines in a minibatch. Raises ConfigError for less than 1."""
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"set_batch_size: batch_size is a whole number of at least 1, got {batch_size!r}")
        self.batch_size = batch_size

    def set_thread(self, thread_num: int) -> None:
        """Nothing that is seen: files are read in their order, whatever reads them."""
        self.thread_num = thread_num

    def set_filelist(self, filelist: Sequence[str]) -> None:
        """The files, in order."""
        self.filelist = [str(path) for path in filelist]

    def set_use_var(self, var_list: Sequence[Any]) -> None:
        """The Variables that slots are fed to, in order. Raises DTypeError unless they are float32 or int64."""
        for v in var_list:
            if v.dtype not in (dtypes.float32, dtypes.int64):
                raise DTypeError(f"set_use_var: {v.name} is {v.dtype.name}; slots hold float32 or int64")
        self.variables = list(var_list)

    set_hdfs_config = _refuse("set_hdfs_config", "copy the files here first")
    set_download_cmd = _refuse("set_download_cmd", "copy the files here first, or read them by set_pipe_command")
    set_fea_eval = _refuse("set_fea_eval", "shuffle a slot in the reader")

    def _rows(self) -> Iterator[Row]:
        if not self.variables:
            raise ConfigError(f"{type(self).__name__}: call set_use_var, which says what a line holds")
        for path in self.filelist:
            for number, line in enumerate(self._lines(path), 1):
                if line.strip():
                    yield self._row(line.split(), f"{path}, line {number}")

    def _lines(self, path: str) -> Iterator[str]:
        with open(path, encoding="utf-8") as file:
            if self.pipe_command == "cat":
                yield from file
                return
            with subprocess.Popen(self.pipe_command, shell=True, stdin=file, stdout=subprocess.PIPE, text=True) as pipe:
                assert pipe.stdout is not None
                yield from pipe.stdout
            if pipe.returncode:
                raise DataError(f"{path}: the command {self.pipe_command!r} ended with {pipe.returncode}")

    def _row(self, words: list[str], where: str) -> Row:
        row, begin = [], 0
        for v in self.variables:
            try:
                count = int(words[begin])
                values = np.array(
                    [*map(float if v.dtype == dtypes.float32 else int, words[begin + 1 : begin + 1 + count])]
                )
            except (IndexError, ValueError) as error:
                raise DataError(f"{where}: slot {v.name} is not a number and that many values ({error})") from error
            if count < 1 or len(values) != count:
                raise DataError(f"{where}: slot {v.name} says {count} values, has {len(values)}; needs at least 1")
            row.append(values.astype(v.dtype))
            begin += 1 + count
        if begin != len(words):
            raise DataError(
                f"{where}: {len(words) - begin} words follow the {len(self.variables)} slots of set_use_var"
            )
        return row

    def feeds(self, drop_last: bool = False) -> Iterator[dict[str, Any]]:
        """Minibatches as feeds; the last may be smaller, unless drop_last."""
        batch: list[Row] = []
        for row in self._rows():
            batch.append(row)
            if len(batch) == self.batch_size:
                yield self._feed(batch)
                batch = []
        if batch and not drop_last:
            yield self._feed(batch)

    def _feed(self, rows: list[Row]) -> dict[str, Any]:
        feed: dict[str, Any] = {}
        for v, column in zip(self.variables, zip(*rows, strict=True), strict=True):
            if v.lod_level:
                lengths = [[len(values) for values in column]]
                feed[v.name] = create_lod_tensor(np.concatenate(column)[:, None], lengths, "cpu")
                continue
            width = int(np.prod(v.shape[1:]))
            for values in column:
                if len(values) != width:
                    raise DataError(
                        f"slot {v.name} has {len(values)} values, its shape {list(v.shape)} takes {width}; declare it "
                        "with lod_level=1 if they differ"
                    )
            feed[v.name] = np.stack(column).reshape(len(rows), *v.shape[1:])
        return feed


class QueueDataset(DatasetBase):
    """Files read anew in every epoch, in order."""

    local_shuffle = _refuse("local_shuffle", "lines are not kept; use InMemoryDataset")
    global_shuffle = _refuse("global_shuffle", "lines are not kept; use InMemoryDataset")


class InMemoryDataset(DatasetBase):
    """Files whose lines are kept, and shuffled, by Python's random."""

    def __init__(self) -> None:
        super().__init__()
        self._loaded: list[Row] | None = None

    def load_into_memory(self) -> None:
        """Read the files."""
        self._loaded = list(super()._rows())

    def preload_into_memory(self, thread_num: int | None = None) -> None:
        """load_into_memory(); it is done when this returns."""
        self.load_into_memory()

    def wait_preload_done(self) -> None:
        """Nothing is left to wait for."""

    def _rows(self) -> Iterator[Row]:
        if self._loaded is None:
            raise DataError("InMemoryDataset: nothing is loaded; call load_into_memory() first")
        return iter(self._loaded)

    def local_shuffle(self) -> None:
        """Put the lines into another order. Raises DataError before load_into_memory()."""
        self._loaded = random.sample(rows := list(self._rows()), len(rows))

    def global_shuffle(self, fleet: Any = None, thread_num: int = 12) -> None:
        """local_shuffle(). Raises ConfigError where fleet has several workers, whose lines would have to change hands.

        thread_num changes nothing.
        """
        if fleet is not None and fleet.worker_num() > 1:
            raise ConfigError("InMemoryDataset.global_shuffle: lines stay with their worker; use local_shuffle()")
        self.local_shuffle()

    def release_memory(self) -> None:
        """Forget the lines."""
        self._loaded = None

    def get_memory_data_size(self, fleet: Any = None) -> int:
        """How many lines this worker has in memory."""
        return len(self._loaded or ())

    def get_shuffle_data_size(self, fleet: Any = None) -> int:
        """How many lines this worker has in memory."""
        return self.get_memory_data_size(fleet)

    def set_queue_num(self, queue_num: int) -> None:
        """Nothing that is seen: there is one order."""

    def set_fleet_send_batch_size(self, fleet_send_batch_size: int = 1024) -> None:
        """Nothing: lines stay with their worker."""

    def set_fleet_send_sleep_seconds(self, fleet_send_sleep_seconds: int = 0) -> None:
        """Nothing: lines stay with their worker."""

    def set_parse_ins_id(self, parse_ins_id: bool) -> None:
        """Raises ConfigError for True: lines have no ids."""
        _need_false("set_parse_ins_id", parse_ins_id)

    def set_parse_content(self, parse_content: bool) -> None:
        """Raises ConfigError for True: lines have no content beside their slots."""
        _need_false("set_parse_content", parse_content)

    set_merge_by_lineid = _refuse("set_merge_by_lineid", "lines have no ids; merge them in set_pipe_command")
    set_generate_unique_feasigns = _refuse("set_generate_unique_feasigns", _NO_SERVER)
    generate_local_tables_unlock = _refuse("generate_local_tables_unlock", _NO_SERVER)


def _need_false(name: str, value: bool) -> None:
    if value:
        raise ConfigError(f"InMemoryDataset.{name}: a line holds the slots of set_use_var alone; leave it out")


class DatasetFactory:
    """Makes datasets by the names of their classes."""

    _KINDS: Iterable[type[DatasetBase]] = (InMemoryDataset, QueueDataset)

    def create_dataset(self, datafeed_class: str = "QueueDataset") -> Any:
        """A "QueueDataset" or an "InMemoryDataset". Raises ConfigError for another name."""
        kinds = {kind.__name__: kind for kind in self._KINDS}
        if datafeed_class not in kinds:
            raise ConfigError(f"create_dataset: {datafeed_class!r}{did_you_mean(datafeed_class, kinds)}")
        return kinds[datafeed_class]()


__all__ = ["DatasetBase", "DatasetFactory", "InMemoryDataset", "QueueDataset"]
