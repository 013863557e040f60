"""The watchdog of a rank: no rank of a job dies, raises or hangs without every other rank ending, and saying why.

A thread sends signs of life to a store (the launcher's, else one in rank 0) and learns there what became of
the other ranks. When one is lost the rest leave through os._exit with code 86: a collective cannot be woken otherwise.
Ages are measured by the monotonic clock of the rank itself, so clocks may jump and differ.
"""

import contextlib
import faulthandler
import io
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

from polyreme import flags
from polyreme.distributed.job.last_words import Failure, LastWords, hold_aborts, leave_now, print_error
from polyreme.distributed.job.monitor import HostedMonitor
from polyreme.distributed.job.progress import WORLD, Phase, Progress
from polyreme.distributed.job.rendezvous import Address, Client, Message
from polyreme.distributed.job.verdict import place
from polyreme.errors import EXIT_WATCHDOG, ConfigError

_STOP_SIGNALS = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
"""Signals that ask for a stop, and the handlers Python starts with."""
VERDICT_SECONDS = 5.0
"""How long a failing rank waits to hear whether it was the first."""


class _WatchOfProcess:
    """The watchdog of this process, if it has one."""

    def __init__(self) -> None:
        self.watch: Watch | None = None


_current = _WatchOfProcess()
_nothing = contextlib.nullcontext()


def start(
    rank: int,
    world_size: int,
    *,
    store: str | None = None,
    share: Callable[[str | None], str] | None = None,
    host: str = "127.0.0.1",
    timeout: float | None = None,
) -> None:
    """Watch this rank of a job; does nothing if it is watched already.

    store is the store's host:port, by default POLYREME_STORE, which the launcher sets. Without either, rank 0 opens a
    store on host, and share(address on rank 0, else None) must give that address to every rank. timeout is the seconds
    without progress that count as a hang, by default POLYREME_WATCHDOG_TIMEOUT (1800). Call it in the main thread;
    under a launcher before jax.distributed.initialize, so that a rank lost during it is noticed, too. Raises
    ConfigError if the store does not answer, or knows a job of another size.
    """
    if _current.watch is not None:
        return
    store = store or flags.store()
    folder = _writable((flags.log_dir() or Path()).absolute())
    hosted = None
    if store is None:
        if share is None:
            raise ConfigError("no store for the watchdog: start the job with polyreme launch, or give start() a share")
        hosted = HostedMonitor(host, world_size, flags.heartbeat_timeout(), folder) if rank == 0 else None
        store = share(str(hosted.address) if hosted else None)
    address = Address.parse(store, "POLYREME_STORE")
    _current.watch = Watch(rank, world_size, address, timeout or flags.watchdog_timeout(), folder, hosted)
    reclaim_signals()
    hold_aborts()


def _writable(folder: Path) -> Path:
    """The folder for stacks and reports, else the system's for temporary files, saying so: no reason to stop a job."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK):
        return folder
    print_error(f"polyreme watchdog: cannot write to {folder}; stacks and reports go to {tempfile.gettempdir()}")
    return Path(tempfile.gettempdir())


def is_started() -> bool:
    """Whether this process is watched."""
    return _current.watch is not None


def phase(
    name: str,
    *,
    group: str | None = None,
    ranks: tuple[int, ...] | None = None,
    detail: object = None,
    timeout: float | None = None,
) -> AbstractContextManager[Any]:
    """Context: this thread does what name says; longer than timeout seconds without an end or a phase inside is a hang.

    For a collective give the group's name: entries are counted per group, which tells who did not reach one. ranks are
    the group's global ranks, by default all. timeout=math.inf never ends. Outside a watched job it costs nothing.

    >>> with phase("all_reduce", group="world", detail="float32[1024]"):
    ...     pass
    """
    watch = _current.watch
    return _nothing if watch is None else Phase(watch.progress, name, group, ranks, detail, timeout)


def collective(name: str, detail: object = None) -> AbstractContextManager[Any]:
    """Context: phase for a collective of all ranks."""
    return phase(name, group=WORLD, detail=detail)


def stage(index: int, task: object, timeout: float | None = None) -> AbstractContextManager[Any]:
    """Context: phase for a task of a pipeline's stage, such as "F microbatch 3"."""
    return phase(f"stage {index}", detail=task, timeout=timeout)


def step(number: int, batch: object = None) -> None:
    """Training step number begins; batch (the ids of its samples, say) is named if the step proves poisonous.

    From the first call on, standing still between steps counts as a hang, until idle().
    """
    watch = _current.watch
    if watch is not None:
        watch.begin_step(number, batch)


def idle() -> None:
    """No step is in progress: what this thread does outside phases from here on takes as long as it takes."""
    watch = _current.watch
    if watch is not None:
        watch.progress.end_steps()


def at(*, step: int | None = None, batch: object = None, phase: str | None = None, detail: object = None) -> None:
    """Say where this thread is, without a context; phase stands until the next call of at."""
    watch = _current.watch
    if watch is not None:
        if step is not None:
            watch.begin_step(step, batch)
        watch.stand_at(phase, detail)


def request_stop() -> None:
    """Ask every rank to stop after the same step; see stop_requested_anywhere."""
    watch = _current.watch
    if watch is not None:
        watch.client.send({"t": "stop"})


def stop_requested_anywhere(step: int, here: bool = False) -> bool:
    """Whether to stop after step, which is done: True on every rank after the same step.

    Every rank must call it after every step. here says that this rank was asked to stop (by a signal that the caller
    handles); SIGTERM and SIGINT that nobody else handles are taken here, from the first call on, and a second one ends
    the rank.
    Save, then exit with code 75. In a process that is not watched it returns here.
    """
    watch = _current.watch
    return here if watch is None else watch.stop_after(step, here)


def reclaim_signals() -> None:
    """Make SIGTERM end this process again: jax.distributed.initialize handles the signal and then ignores it.

    Called by start; call it after jax.distributed.initialize if that comes later. A handler of Python's own is kept.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Watch:
    """The watchdog's state and threads; made by start."""

    rank: int
    progress: Progress

    def __init__(
        self, rank: int, world_size: int, address: Address, timeout: float, folder: Path, hosted: HostedMonitor | None
    ) -> None:
        self.rank, self.progress = rank, Progress(timeout)
        self._hosted, self._store, self._folder = hosted, str(address), folder
        self._is_closing = False
        self._end: Message | None = None
        self._end_known = threading.Event()
        self._is_failing = False
        self._leaves = threading.Lock()
        self._standing: Phase | None = None
        self._stop = _StopAgreement()
        self._stacks = _Stacks(folder, rank, flags.attempt())
        who = {"kind": "rank", "rank": rank, "world": world_size, "host": socket.gethostname()}
        who["attempt"] = flags.attempt()
        self._hears = threading.Lock()
        self.client: Client
        with self._hears:  # no message is handled before the client has a name
            self.client = Client(address, who, self._receive, self._store_ended, flags.init_timeout())
        self._last_words = LastWords(rank, self._report_error, self._report_leaving)
        threading.Thread(target=self._beat, name="polyreme-watchdog", daemon=True).start()

    # the program's side

    def begin_step(self, number: int, batch: object) -> None:
        """Told to the store at once, so that a rank killed in its next line is known to have been in this step."""
        self.progress.begin_step(number, batch)
        self._last_words.forget_exit()
        self._send("beat")

    def stand_at(self, phase: str | None, detail: object) -> None:
        """Replace the phase that at() set before."""
        if self._standing is not None:
            self._standing.__exit__()
        self._standing = None if phase is None else Phase(self.progress, phase, None, None, detail, None).__enter__()

    def stop_after(self, step: int, here: bool) -> bool:
        """See stop_requested_anywhere."""
        if here or self._stop.take_signal():
            self.client.send({"t": "stop"})
            self._stop.expect()
        with phase("stop_agreement", group="stop_agreement"):  # counted: tells which rank did not finish its step
            return self._stop.is_last(step)

    # the watchdog's side

    def _send(self, message: str, **values: Any) -> None:
        self.client.send({"t": message, "status": self.progress.status(), **values})

    def _beat(self) -> None:
        pause, told = flags.heartbeat(), False
        while True:
            self._stacks.arm(max(3 * pause, min(10.0, self.progress.timeout)))
            is_overdue = self.progress.overdue()
            self._send("overdue" if is_overdue and not told else "beat")
            told = is_overdue
            time.sleep(min(pause, self.progress.timeout / 4))

    def _receive(self, message: Message) -> None:
        with self._hears:
            kind = message.get("t")
        if kind == "dump":
            status = self.progress.status()
            self._stacks.write(place(status))
            self._send("dumped")
        elif kind == "counter?":
            self.client.send({"t": "counter", "step": self._stop.freeze()})
        elif kind == "stop_at":
            self._stop.set(message.get("step"))
        elif kind == "closing":
            self._is_closing = True
        elif kind == "end":
            self._end = message
            self._end_known.set()
            if not self._is_failing:
                self._leave_with_the_others(message)

    def _store_ended(self) -> None:
        if self._end is None and not self._is_closing and not self.progress.is_leaving:
            who = "the launcher" if flags.store() else "rank 0"
            self._leave_with_the_others({"headline": f"{who}, which kept the store at {self._store}, is gone"})

    def _leave_with_the_others(self, message: Message, then: str = "") -> NoReturn:
        """then is how this rank failed after another one did, if it has."""
        if not self._leaves.acquire(blocking=False):
            time.sleep(60)  # another thread is about to end the process
        if then:
            print_error(f"rank {self.rank} failed as a consequence: {then}")
        status = self.progress.status()
        age = f" for {status['age']:.1f} s" if "age" in status else ""
        print_error(
            f"polyreme watchdog: {message['headline']}. Rank {self.rank} was {place(status)}{age}; it leaves with exit "
            f"code {EXIT_WATCHDOG}"
        )
        self._stacks.close()
        self._let_monitor_write()
        leave_now(EXIT_WATCHDOG)

    def _let_monitor_write(self) -> None:
        """The monitor, if it is in this process, writes its report now."""
        if self._hosted is not None:
            time.sleep(0.3)

    # endings of this process

    def _report_error(self, failure: Failure) -> bool:
        """Tell the store; whether this rank failed first. Does not return if another did."""
        self._is_failing = True
        if self._end is None:
            kind = "exited" if failure.error is None else "raised"
            self._send("error", kind=kind, error=failure.line, traceback=failure.traceback, code=failure.code)
            self._end_known.wait(VERDICT_SECONDS)
        if self._end is not None and self._end["verdict"]["rank"] != self.rank:
            self._leave_with_the_others(self._end, then=failure.line)
        self._stacks.close()
        self._let_monitor_write()
        return True

    def _report_leaving(self) -> None:
        self.progress.is_leaving = True
        self.progress.end_steps()
        self._stacks.close()
        self._send("leave")


class _StopAgreement:
    """The step after which all ranks stop.

    When a rank asks to stop, the watchdog threads of all ranks tell the last step for which the program here was let
    go on, and hold further questions until the answer comes: one more than the largest. No rank can have passed it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._passed: int | None = None
        self._is_open = True
        self._is_agreed = False
        self._last: int | None = None
        self._got_signal = False
        self._has_handler = False

    def take_signal(self) -> bool:
        """Whether a signal asked to stop; the first call, in the main thread, handles those that nobody else does."""
        if not self._has_handler and threading.current_thread() is threading.main_thread():
            self._has_handler = True
            for number, default in _STOP_SIGNALS.items():
                if signal.getsignal(number) == default:
                    signal.signal(number, self._note_signal)
        came, self._got_signal = self._got_signal, False
        return came

    def _note_signal(self, number: int, frame: object) -> None:
        self._got_signal = True
        signal.signal(number, signal.SIG_DFL)
        name = signal.Signals(number).name
        print_error(f"{name}: stopping after a step that all ranks agree on; once more to end at once")

    def expect(self) -> None:
        """An agreement is on its way: hold questions until it comes."""
        with self._changed:
            self._is_open = self._is_agreed

    def freeze(self) -> int | None:
        """Hold questions; the last step for which the program was let go on."""
        with self._changed:
            self._is_open = False
            return self._passed

    def set(self, last: int | None) -> None:
        """Make all ranks stop after step last; None: after the first step that any of them asks about."""
        with self._changed:
            self._last, self._is_agreed, self._is_open = last, True, True
            self._changed.notify_all()

    def is_last(self, step: int) -> bool:
        """Whether to stop after step; waits while an agreement is being made."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_open)
            if self._is_agreed:
                return self._last is None or step >= self._last
            self._passed = step
            return False


class _Stacks:
    """The file with the stacks of all threads: folder/stacks.rankN.txt, made when it is needed or may be.

    If native code keeps Python's lock, the watchdog's own thread cannot run; faulthandler's can, and writes the stacks.
    """

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        self._path = folder / f"stacks.rank{rank}.txt"
        self._title = f"attempt {attempt}, rank {rank}"
        self._file: io.FileIO | None = io.FileIO(self._path, "a")
        self._is_arming = threading.Lock()

    def arm(self, seconds: float) -> None:
        """Write the stacks unless armed again within seconds."""
        with self._is_arming:
            if self._file is not None:
                faulthandler.dump_traceback_later(seconds, file=self._file)

    def write(self, where: str) -> None:
        """Now, from this thread."""
        with self._is_arming:
            if self._file is not None:
                self._file.write(f"--- {self._title}, {where}\n".encode())
                faulthandler.dump_traceback(self._file, all_threads=True)

    def close(self) -> None:
        """Leave no empty file behind."""
        with self._is_arming:
            if self._file is None:
                return
            faulthandler.cancel_dump_traceback_later()
            is_empty = self._file.tell() == 0 and self._path.exists() and self._path.stat().st_size == 0
            self._file.close()
            self._file = None
            if is_empty:
                self._path.unlink()
