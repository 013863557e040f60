"""The parent's side of the worker processes: hands out tasks, takes batches in order, notices the dead and the hung."""

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import connection, shared_memory
from typing import Any

from polyreme import flags
from polyreme.errors import DataError
from polyreme.io import worker as worker_process
from polyreme.io.failure import doing
from polyreme.io.fetch import LeftOut
from polyreme.io.shared import InSlot, View, slot_names
from polyreme.io.shipment import Definitions, pack
from polyreme.io.worker import IDLE, STARTING, BatchRequest, Begin, Reply, Setup

_GRACE = 1.0  # seconds a worker has to leave when asked, and again when terminated
_AHEAD = 2  # times its prefetch_factor, how many batches a quick worker may hold while a slow one has fewer
_FORGIVEN = 0.99  # after 230 batches ten times as slow counts as slow as others
_COUNT = itertools.count()  # pools of this process, for unique names of segments


@dataclass(frozen=True)
class PoolOptions:
    """How a pool works; timeout in seconds, 0 for none."""

    num_workers: int
    prefetch_factor: int
    use_shared_memory: bool
    timeout: float
    seed: int
    stream: bool
    drop_last: bool
    skips_bad: bool = False
    is_shared: bool = False
    """Whether any worker may take any batch."""


@dataclass
class _WorkerHandle:
    number: int
    process: Any
    tasks: connection.Connection
    results: connection.Connection
    progress: Any
    views: list[View]
    sent: int = 0
    seconds: float = 0.0
    """What a batch takes it, as far as is known."""
    ended: bool = False
    waiting: deque[BatchRequest] = field(default_factory=deque)

    def view(self, message: Any) -> Any:
        """The batch of a reply; its arrays may look into shared memory."""
        return self.views[self.waiting[0].slot].read(message) if isinstance(message, InSlot) else message

    @property
    def busy_seconds(self) -> float:
        """How long it would take to answer one more task, as far as is known."""
        return (self.sent - self.progress[2] + 1) * self.seconds

    def free_slot(self) -> int:
        """The first slot that no batch is in or on its way to."""
        taken = {task.slot for task in self.waiting}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)


class WorkerPool:
    """Worker processes for one dataset; `begin` an epoch, then `take` its batches in the order of its tasks."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        worker_init_fn: Any,
        options: PoolOptions,
        left_out: LeftOut,
    ) -> None:
        self._options, self._left_out = options, left_out
        self._order: deque[_WorkerHandle] = deque()
        self._tasks: Iterator[BatchRequest] = iter(())
        self._workers, self._definitions, memory = _start((dataset, collate_fn, worker_init_fn), options)
        self._finalizer = weakref.finalize(self, _shut, self._workers, memory, os.getpid())

    @property
    def closed(self) -> bool:
        """Whether the workers are gone."""
        return not self._finalizer.alive

    def begin(self, epoch: int, tasks: Iterator[BatchRequest]) -> None:
        """Start an epoch: drop what is left of the one before, and give every worker prefetch_factor tasks."""
        while self._order:
            worker = self._order.popleft()
            self._reply(worker)
            self._done(worker)
        self._tasks = tasks
        for worker in self._workers:
            worker.ended = False
            self._send(worker, Begin(epoch))
        for _ in range(self._options.prefetch_factor):
            for worker in self._workers:
                self._hand_out(worker)

    def take(self, convert: Callable[[Any], Any]) -> Any:
        """convert(the next batch), which must copy what it keeps; StopIteration after the last one.

        Raises DataError, and closes the pool, when a worker fails, dies or does not answer within the timeout, or
        without one reads no sample for POLYREME_LOADER_STALL seconds.
        """
        try:
            found, batch = self._take(convert)
        except BaseException:  # Ctrl-C too: a message may have been read in part
            self.close()
            raise
        if not found:
            raise StopIteration
        return batch

    def _take(self, convert: Callable[[Any], Any]) -> tuple[bool, Any]:
        while self._order:
            worker = self._order.popleft()
            reply = self._reply(worker)
            if reply.kind == "failed":
                raise reply.content.raised_by(worker.number, worker.process.pid)
            self._left_out.note(reply.left_out)
            worker.ended = worker.ended or reply.kind == "end"
            batch = convert(worker.view(reply.content)) if reply.kind == "batch" else None
            self._done(worker)
            if not worker.ended:
                self._hand_out(self._quickest() if self._options.is_shared else worker)
            if reply.kind == "batch":
                return True, batch
        return False, None

    def ready(self) -> bool:
        """Whether the next batch has already arrived."""
        return bool(self._order) and self._order[0].results.poll()

    def close(self) -> None:
        """Stop the workers and give their shared memory back."""
        self._finalizer()

    def _quickest(self) -> _WorkerHandle:
        """The worker that is likely to answer first. One that was slow is forgiven as time goes on, since it may have
        been a slow sample."""
        open_to = [worker for worker in self._workers if len(worker.waiting) < _AHEAD * self._options.prefetch_factor]
        chosen = min(open_to, key=lambda worker: (worker.busy_seconds, len(worker.waiting)))
        for worker in open_to:
            worker.seconds *= _FORGIVEN
        return chosen

    def _hand_out(self, worker: _WorkerHandle) -> None:
        task = next(self._tasks, None)
        if task is not None:
            task = replace(task, slot=worker.free_slot())
            worker.sent += 1
            self._send(worker, task)
            worker.waiting.append(task)
            self._order.append(worker)

    def _send(self, worker: _WorkerHandle, message: Any) -> None:
        with contextlib.suppress(OSError):  # it is dead: the next wait says so, and how
            worker.tasks.send(message)

    def _done(self, worker: _WorkerHandle) -> None:
        worker.waiting.popleft()
        worker.seconds = worker.progress[3] / 1e9

    def _reply(self, worker: _WorkerHandle) -> Reply:
        timeout, stall = self._options.timeout, 0.0 if self._options.timeout else flags.loader_stall()
        limit = timeout or stall
        deadline = time.monotonic() + limit if limit else None
        progress = tuple(worker.progress)
        watched = {each.process.sentinel: each for each in self._workers}
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = connection.wait([worker.results, *watched], left)
            dead = [watched[one] for one in ready if one in watched]
            if dead:
                self._fail(dead[0], _death(dead[0].process))
            if ready:
                try:
                    return self._definitions.loads(worker.results.recv_bytes())
                except (EOFError, OSError):  # it died in the middle of a message
                    worker.process.join(_GRACE)
                    self._fail(worker, _death(worker.process))
            if deadline is None or time.monotonic() < deadline:
                continue
            if timeout:
                self._fail(worker, f"gave no batch within the timeout of {timeout} s", hung=True)
            # without a timeout a batch may take any time, as long as its samples come
            if tuple(worker.progress) == progress:
                self._fail(worker, f"has read no sample for {stall:g} s (POLYREME_LOADER_STALL)", hung=True)
            progress, deadline = tuple(worker.progress), time.monotonic() + stall

    def _fail(self, worker: _WorkerHandle, what: str, hung: bool = False) -> None:
        number, position = worker.progress[:2]
        task = next((task for task in worker.waiting if task.number == number), None)
        if position == STARTING:
            where = "starting"
        elif position == IDLE or task is None:
            where = "between batches"
        else:
            where = doing(task.content, position)
        advice = (
            "raise timeout if the samples are only slow"
            if hung
            else "set num_workers=0 to see the failure in this process; signal 9 is often the system out of memory"
        )
        message = f"DataLoader worker {worker.number} (pid {worker.process.pid}) {what} while {where}; {advice}"
        self.close()
        raise DataError(message)


def _start(
    content: tuple, options: PoolOptions
) -> tuple[list[_WorkerHandle], Definitions, shared_memory.SharedMemory | None]:
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        # in place of the default, which imports the user's script into the server
        context.set_forkserver_preload([worker_process.__name__])
    prefix = f"polyreme{os.getpid()}p{next(_COUNT)}"
    shipment, definitions, memory = pack(content, f"{prefix}data", options.use_shared_memory)
    slots = options.prefetch_factor * (_AHEAD if options.is_shared else 1) if options.use_shared_memory else 0
    setup = Setup(
        shipment=shipment,
        num_workers=options.num_workers,
        seed=options.seed,
        stream=options.stream,
        drop_last=options.drop_last,
        skips_bad=options.skips_bad,
        slots=slots,
        prefix=prefix,
        # a dataset that computes with Tensors must not take the accelerator's memory from the training
        environ={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    workers: list[_WorkerHandle] = []
    try:
        for number in range(options.num_workers):
            workers.append(_start_one(context, number, setup))
    except BaseException:
        _shut(workers, memory, os.getpid())
        raise
    return workers, definitions, memory


def _start_one(context: Any, number: int, setup: Setup) -> _WorkerHandle:
    task_reader, tasks = context.Pipe(duplex=False)
    results, result_writer = context.Pipe(duplex=False)
    progress = context.RawArray("q", [-1, STARTING, 0, 0])
    process = context.Process(
        target=worker_process.main,
        args=(number, setup, task_reader, result_writer, progress),
        name=f"polyreme-data-{number}",
        daemon=True,
    )
    with _script_kept_out():
        process.start()
    # only the worker may hold these: the end of a pipe is how each side learns that the other is gone
    task_reader.close()
    result_writer.close()
    views = [View(name) for name in slot_names(setup.prefix, number, setup.slots)]
    return _WorkerHandle(number, process, tasks, results, progress, views)


@contextlib.contextmanager
def _script_kept_out() -> Iterator[None]:
    # A child first runs the user's script again, for the classes defined in it: seconds of importing jax per worker,
    # and endless processes without a __main__ guard. The shipment brings what it needs of the script.
    script = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _death(process: Any) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"exited with code {code}"


def _shut(workers: list[_WorkerHandle], memory: shared_memory.SharedMemory | None, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the parent: the workers are not its own
        return
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.tasks.send(None)
        worker.tasks.close()
    for stop in (None, "terminate", "kill"):
        deadline = time.monotonic() + _GRACE
        for worker in workers:
            if stop is not None and worker.process.is_alive():
                getattr(worker.process, stop)()
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
    for worker in workers:
        worker.results.close()
        for view in worker.views:
            view.remove()
    if memory is not None:
        memory.close()
        with contextlib.suppress(FileNotFoundError):
            memory.unlink()
