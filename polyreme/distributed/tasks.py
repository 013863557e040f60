"""Tasks whose batches differ in size, trained together: every device gets as many rows as any other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from polyreme import flags
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError, did_you_mean
from polyreme.io.dataloader import DataLoader
from polyreme.io.dataset import ConcatDataset, Dataset
from polyreme.io.sampler import Sampler
from polyreme.io.seed import epoch_rng, seed_of
from polyreme.ops.experts.mixture import check_counts


@dataclass(frozen=True)
class TaskPlan:
    """The positions of the rows of several tasks in one batch that devices split evenly.

    rows: samples of each task in a batch; devices: how many split it, dp * sharding * ep of the plan in force. A batch
    has the tasks one after the other, so a heavy task is spread over several devices and light ones share one: no
    device waits for another that has more to do. Raises ConfigError where the devices do not divide the rows.
    Source: the elastic training of unbalanced tasks in arXiv:2205.10034.

    >>> tasks = TaskPlan({"face": 6, "car": 1, "food": 1}, devices=4)
    >>> tasks.rows_per_device, tasks.devices_of("face"), tasks.devices_of("food")
    (2, range(0, 3), range(3, 4))
    """

    rows: Mapping[str, int]
    devices: int

    def __post_init__(self) -> None:
        if not self.rows or not isinstance(self.rows, Mapping):
            raise ConfigError(
                f"TaskPlan: rows names no task, got {self.rows!r}; give rows of a batch by task, such as "
                "{'face': 512}"
            )
        for what, count in (("devices", self.devices), *((f"rows of {task!r}", n) for task, n in self.rows.items())):
            if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
                raise ConfigError(f"TaskPlan: {what} must be a whole number of at least 1, got {count!r}")
        total = sum(self.rows.values())
        if total % self.devices:
            heaviest = max(self.rows, key=lambda task: self.rows[task])
            more = self.rows[heaviest] + -total % self.devices
            raise ConfigError(
                f"TaskPlan: {total} rows of a batch do not divide over {self.devices} devices; {heaviest!r} with "
                f"{more} rows instead of {self.rows[heaviest]} would"
            )

    @property
    def rows_per_device(self) -> int:
        """Rows of a batch on each device."""
        return sum(self.rows.values()) // self.devices

    def devices_of(self, task: str) -> range:
        """The devices that have rows of this task, counted along the axes that split the batch."""
        starts = dict(zip(self.rows, itertools.accumulate(self.rows.values(), initial=0), strict=False))
        first = starts[self._named(task)]
        return range(first // self.rows_per_device, -(-(first + self.rows[task]) // self.rows_per_device))

    def __str__(self) -> str:
        width = max(map(len, self.rows))
        lines = [f"{self.rows_per_device} rows on each of {self.devices} devices"]
        for task, rows in self.rows.items():
            devices = self.devices_of(task)
            where = f"devices {devices[0]} to {devices[-1]}" if len(devices) > 1 else f"device {devices[0]}"
            lines.append(f"  {task:{width}}  {rows} rows on {where}")
        return "\n".join(lines)

    def loader(
        self,
        datasets: Mapping[str, Any],
        *,
        shuffle: bool = True,
        generator: Any = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        **options: Any,
    ) -> DataLoader:
        """A DataLoader of batches of all tasks; what a batch of them has, then the number of each row's task, int32.

        An epoch reads the task with most batches once; the others begin anew when they end. shuffle: each task in an
        order of its own, by a generator as RandomSampler takes it, the same in all processes. Of num_replicas processes
        (all of a job by default) the one of this rank reads its part of each batch. options are DataLoader's. Raises
        ConfigError where a task has no dataset or an empty one.
        """
        if not isinstance(datasets, Mapping):
            raise ConfigError(f"TaskPlan: datasets is a {type(datasets).__name__}; give a mapping of tasks to datasets")
        for task in datasets:
            self._named(task)
        for task in self.rows:
            if task not in datasets or len(datasets[task]) == 0:
                raise ConfigError(f"TaskPlan: no dataset with samples for task {task!r}; give one for each task")
        nranks = flags.trainers_num() if num_replicas is None else num_replicas
        place = flags.trainer_id() if rank is None else rank
        if nranks < 1 or self.devices % nranks or not 0 <= place < nranks:
            raise ConfigError(
                f"TaskPlan: rank {place} of {nranks} processes for {self.devices} devices; processes must divide the "
                "devices, and ranks count from 0"
            )
        named = [_OfTask(datasets[task], number) for number, task in enumerate(self.rows)]
        seed = seed_of(generator, "TaskPlan.loader")
        sampler = TaskBatchSampler([len(d) for d in named], list(self.rows.values()), shuffle, seed, nranks, place)
        return DataLoader(ConcatDataset(named), batch_sampler=sampler, **options)

    def allowed(self, experts: Mapping[str, Sequence[int]], num_experts: int) -> Tensor:
        """bool [tasks, num_experts]: which experts each task may choose; its row of a token is what nn.MoE takes.

        Raises ConfigError for a task without experts and for experts that there are not.
        """
        check_counts("TaskPlan.allowed", num_experts=num_experts)
        table = np.zeros((len(self.rows), num_experts), bool)
        for task in experts:
            self._named(task)
        for number, task in enumerate(self.rows):
            chosen = np.asarray(experts.get(task, ()))
            is_list = chosen.ndim == 1 and chosen.size > 0 and chosen.dtype.kind in "iu"
            if not is_list or chosen.min() < 0 or chosen.max() >= num_experts:
                raise ConfigError(
                    f"TaskPlan: experts {chosen.tolist()} of task {task!r}; give a list of some of 0 to "
                    f"{num_experts - 1}"
                )
            table[number, chosen] = True
        return to_tensor(table)

    def _named(self, task: str) -> str:
        if task not in self.rows:
            raise ConfigError(f"TaskPlan: unknown task {task!r}{did_you_mean(task, self.rows)}")
        return task


class TaskBatchSampler(Sampler):
    """Indices into datasets of these lengths laid end to end: of each so many rows a batch, by part for one process.

    With shuffle the order is a pure function of (seed, epoch).
    """

    lengths: list[int]
    rows: list[int]
    shuffle: bool
    seed: int
    epoch: int
    part: slice[int, int, Any]

    def __init__(
        self, lengths: list[int], rows: list[int], shuffle: bool, seed: int, nranks: int = 1, rank: int = 0
    ) -> None:
        super().__init__()
        self.lengths, self.rows, self.shuffle = lengths, rows, shuffle
        self.seed, self.epoch = seed, 0
        share = sum(rows) // nranks
        self.part = slice(rank * share, (rank + 1) * share)
        self.batch_size = share

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of epoch `epoch`."""
        self.epoch = int(epoch)

    def __len__(self) -> int:
        return max(math.ceil(length / rows) for length, rows in zip(self.lengths, self.rows, strict=True))

    def __iter__(self) -> Iterator[list[int]]:
        rng = epoch_rng(self.seed, self.epoch) if self.shuffle else None
        self.epoch += 1
        starts = itertools.accumulate(self.lengths, initial=0)
        orders = [
            start + self._order(length, rows * len(self), rng).reshape(-1, rows)
            for start, length, rows in zip(starts, self.lengths, self.rows, strict=False)
        ]
        for batch in np.concatenate(orders, 1)[:, self.part]:
            yield batch.tolist()

    @staticmethod
    def _order(length: int, count: int, rng: np.random.Generator | None) -> np.ndarray:
        times = math.ceil(count / length)
        rounds = [np.arange(length) if rng is None else rng.permutation(length) for _ in range(times)]
        return np.concatenate(rounds)[:count]


class _OfTask(Dataset):
    """A dataset whose samples say the number of their task, last."""

    def __init__(self, dataset: Any, number: int) -> None:
        self.dataset, self.number = dataset, np.int32(number)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        if isinstance(sample, Mapping):
            return {**sample, "task": self.number}
        return (*sample, self.number) if isinstance(sample, (tuple, list)) else (sample, self.number)
