"""The worker process: takes tasks from its pipe, reads the samples, and sends batches back."""

import os
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np

from polyreme import faults
from polyreme.io.collate import materialize
from polyreme.io.failure import WorkerFailure, doing
from polyreme.io.fetch import EMPTY, END, MapFetcher, StreamFetcher
from polyreme.io.shared import Slot, slot_names
from polyreme.io.shipment import Definitions, Shipment
from polyreme.io.worker_info import WorkerInfo, become_worker, set_worker_info

# progress holds the number of the task; the place in its batch of the sample being read, -1 for collation, or one of
# these; how many tasks were answered; and the nanoseconds that the last one took
IDLE = -2
STARTING = -3


@dataclass(frozen=True)
class Begin:
    """An epoch begins: streams start again."""

    epoch: int


@dataclass(frozen=True)
class BatchRequest:
    """One batch to read: sample indices, one index, or for a stream how many samples (None: one bare sample).

    skip is for a stream that resumes: read, but do not send. slot: of the worker's, which the batch goes into.
    """

    number: int
    content: Any
    skip: bool = False
    slot: int = 0


@dataclass(frozen=True)
class Reply:
    """The answer to one task."""

    kind: Literal["batch", "skipped", "end", "failed"]
    content: Any = None
    left_out: tuple[tuple[Any, str], ...] = ()


@dataclass(frozen=True)
class Setup:
    """What every worker of a pool is started with; the shipment holds (dataset, collate_fn, worker_init_fn)."""

    shipment: Shipment
    num_workers: int
    seed: int
    stream: bool
    drop_last: bool
    skips_bad: bool
    slots: int
    prefix: str
    environ: dict[str, str]


def main(worker: int, setup: Setup, tasks: Connection, results: Connection, progress: Any) -> None:
    """Run until the parent says stop or is gone."""
    become_worker()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    os.environ.clear()  # the server that forks the workers keeps the environment it was started with
    os.environ.update(setup.environ)
    names = slot_names(setup.prefix, worker, setup.slots)
    state = _WorkerLoop(worker, setup, results, progress, [Slot(name) for name in names])
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(tasks, inbox, state.leave), daemon=True).start()
    content = state.unpack()
    while content is None:  # the failure is on its way; wait to be stopped
        inbox.get()
    state.serve(inbox, *content)


def _receive(tasks: Connection, inbox: queue.SimpleQueue, leave: Callable[[], None]) -> None:
    # a thread of its own, so that a busy or hung dataset notices that the parent is gone, and so that the parent's
    # sending never waits for a worker that is itself waiting for the parent to read
    while True:
        try:
            message = tasks.recv()
        except (EOFError, OSError):
            leave()
            return
        if message is None:
            leave()
            return
        inbox.put(message)


class _WorkerLoop:
    def __init__(self, worker: int, setup: Setup, results: Connection, progress: Any, slots: list[Slot]) -> None:
        self._id = worker
        self._setup = setup
        self._results = results
        self._progress = progress
        self._slots = slots
        self._memory: Any = None
        self._definitions = Definitions(())
        self._writing = threading.Lock()  # held while slots change, so that leaving removes every one of them

    def unpack(self) -> tuple[Any, Callable[[Any], Any], bool] | None:
        """The dataset, the collate function and whether to seed each batch; None once a failure has been sent."""
        place = "unpacking the dataset"
        try:
            (dataset, collate_fn, init_fn), self._definitions, self._memory = self._setup.shipment.open()
            seed = (self._setup.seed + self._id) % 2**32  # what np.random.seed takes
            set_worker_info(WorkerInfo(self._id, self._setup.num_workers, dataset, seed))
            if init_fn is not None:
                place = f"calling worker_init_fn({self._id})"
                _seed([seed])
                init_fn(self._id)
        except Exception as error:  # noqa: BLE001  (whatever the user's code raises belongs to the parent)
            self._results.send(Reply("failed", WorkerFailure.of(error, place)))
            return None
        return dataset, collate_fn, init_fn is None

    def serve(self, inbox: queue.SimpleQueue, dataset: Any, collate_fn: Callable[[Any], Any], seeded: bool) -> None:
        fetcher: Any = None
        epoch = 0
        failed: WorkerFailure | None = None
        self._note(IDLE)
        while True:
            message = inbox.get()
            if isinstance(message, Begin):
                epoch = message.epoch
                fetcher, failed = self._fetcher(dataset, collate_fn)
                continue
            if seeded:
                _seed([self._setup.seed, epoch, message.number])
            began = time.monotonic_ns()
            reply = Reply("failed", failed) if failed else self._reply(fetcher, message)
            self._progress[3] = time.monotonic_ns() - began
            self._send(reply)

    def leave(self) -> None:
        """Remove the slots and end the process, whatever it is doing."""
        try:
            with self._writing:
                for slot in self._slots:
                    slot.remove()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # not sys.exit: the dataset may be in the middle of a sample, and its arrays still look at shared memory
            os._exit(0)

    def _fetcher(self, dataset: Any, collate_fn: Callable[[Any], Any]) -> tuple[Any, WorkerFailure | None]:
        try:
            if self._setup.stream:
                return StreamFetcher(dataset, collate_fn, self._note, self._setup.drop_last), None
            return MapFetcher(dataset, collate_fn, self._note, self._setup.skips_bad), None
        except Exception as error:  # noqa: BLE001  (as above)
            return None, WorkerFailure.of(error, "starting to iterate over the dataset")

    def _note(self, position: int, sample_id: Any = None) -> None:
        self._progress[1] = position
        if position >= 0:
            faults.point("data.worker", sample_id)

    def _reply(self, fetcher: Any, task: BatchRequest) -> Reply:
        place = ""
        self._progress[0] = task.number
        try:
            batch = fetcher.fetch(task.content, task.skip)
            if batch is END:
                return Reply("end")
            left_out = fetcher.take_left_out()
            if task.skip or batch is EMPTY:
                return Reply("skipped", left_out=left_out)
            place = "writing " + doing(task.content, -1).removeprefix("reading ").removeprefix("collating ")
            return Reply("batch", self._stored(batch, task.slot), left_out)
        except Exception as error:  # noqa: BLE001  (as above)
            return Reply("failed", WorkerFailure.of(error, place or doing(task.content, fetcher.position)))

    def _stored(self, batch: Any, slot: int) -> Any:
        if not self._slots:
            return materialize(batch)
        with self._writing:
            return self._slots[slot].write(batch)

    def _send(self, reply: Reply) -> None:
        self._progress[2] += 1
        self._note(IDLE)
        try:
            data = self._definitions.dumps(reply)
        except Exception as error:  # noqa: BLE001  (pickling calls the user's classes)
            data = self._definitions.dumps(Reply("failed", WorkerFailure.of(error, "sending its batch")))
        try:
            self._results.send_bytes(data)
        except OSError:  # the parent is gone
            self.leave()


def _seed(key: list[int]) -> None:
    # per batch and not per worker, so that random augmentation does not depend on which worker reads the batch
    words = np.random.SeedSequence(key).generate_state(4)
    np.random.seed(words)
    random.seed(words.tobytes())
