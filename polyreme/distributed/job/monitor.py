"""The server's side of the watchdog: knows every rank of one attempt and concludes once why it must end.

Runs in one event loop: in the launcher of node 0, or in a thread of rank 0 when there is no launcher.
"""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from polyreme import flags
from polyreme.distributed.job.rendezvous import Address, Connection, Message, serve
from polyreme.distributed.job.verdict import FINE, Status, Verdict, behind, blame
from polyreme.errors import ConfigError

ERROR_GRACE = 0.7
"""Seconds to wait after an exception for a death that caused it: a collective whose peer is gone raises, too."""
DUMP_SECONDS = 3.0
"""How long ranks may take to write their stacks when one hangs."""


class Monitor:
    """Ranks that check in, their last status, and the verdict.

    on_verdict is called once, after the ranks were told. Silence longer than heartbeat_timeout seconds ends a job too.
    hosting_rank is the rank whose process this runs in, if it is one.
    """

    world_size: int
    attempt: int

    def __init__(
        self,
        world_size: int,
        attempt: int,
        heartbeat_timeout: float,
        on_verdict: Callable[[Verdict], None],
        hosting_rank: int | None = None,
    ) -> None:
        self.world_size, self.attempt = world_size, attempt
        self._hosting_rank = hosting_rank
        self.verdict: Verdict | None = None
        self.statuses: dict[int, Status] = {}
        self.hosts: dict[int, str] = {}
        self._on_verdict = on_verdict
        self._heartbeat_timeout = heartbeat_timeout
        self._connections: dict[int, Connection] = {}
        self._heard: dict[int, float] = {}
        self._errors: list[Verdict] = []
        self._codes: dict[int, int] = {}
        self._leavers: set[int] = set()
        self._is_concluding = False
        self._waits_for_dump: set[int] = set()
        self._is_stopping = False
        self._stop_counters: dict[int, int | None] = {}
        self._loop = asyncio.get_running_loop()
        self._watching = self._loop.create_task(self._watch_silence())

    @property
    def watched(self) -> list[int]:
        """Ranks that have a watchdog."""
        return sorted(self.hosts)

    def close(self) -> None:
        """Stop watching."""
        self._watching.cancel()

    # what the server calls

    def token(self, who: Message) -> str:
        """The token that a rank must show."""
        return flags.job_token()

    def refusal(self, who: Message) -> str | None:
        """Why a rank cannot be of this job."""
        rank, world, attempt = who.get("rank"), who.get("world"), who.get("attempt")
        if attempt != self.attempt:
            return f"this is attempt {self.attempt} of the job, and the rank is left over from attempt {attempt}"
        if world != self.world_size or not isinstance(rank, int) or not 0 <= rank < self.world_size:
            return (
                f"rank {rank} of {world} does not fit this job of {self.world_size} ranks; give every rank the same "
                "world size, and ranks from 0 to that less one"
            )
        if rank in self._connections:
            return f"rank {rank} is there already, on {self.hosts[rank]}; give every process a rank of its own"
        return None

    def opened(self, connection: Connection) -> None:
        """A rank checks in."""
        rank = connection.who["rank"]
        self._connections[rank] = connection
        self.hosts[rank] = str(connection.who.get("host", ""))
        self._heard[rank] = self._loop.time()
        if self.verdict is not None:
            self._tell_end(connection)

    def received(self, connection: Connection, message: Message) -> None:
        """A rank reports."""
        rank = connection.who["rank"]
        self._heard[rank] = self._loop.time()
        if isinstance(message.get("status"), dict):
            self.statuses[rank] = message["status"]
        kind = message.get("t")
        if kind == "error":
            self._note_error(rank, message)
        elif kind == "overdue":
            self._begin_dump(rank)
        elif kind == "leave" and rank == self._hosting_rank:
            for connection in self._connections.values():
                connection.send({"t": "closing"})
        elif kind == "dumped":
            self._waits_for_dump.discard(rank)
        elif kind == "stop":
            self.request_stop()
        elif kind == "counter":
            self._stop_counters[rank] = message.get("step")
            self._agree_on_stop()
        if self.statuses.get(rank, {}).get("leaving"):
            self._leavers.add(rank)
            for other in list(self.statuses):
                self._check_for_leavers(other)
        elif self._leavers:
            self._check_for_leavers(rank)

    def closed(self, connection: Connection) -> None:
        """A rank's connection is gone: fine if it said that it is leaving, else the process is."""
        rank = connection.who["rank"]
        self._connections.pop(rank, None)
        self._waits_for_dump.discard(rank)
        if self._is_stopping:
            self._agree_on_stop()
        if not self.statuses.get(rank, {}).get("leaving"):
            self._conclude(self._known_error(rank) or self._make("died", rank, code=self._codes.get(rank)))

    # what a launcher calls

    def exited(self, rank: int, code: int) -> None:
        """A process ended, as its parent saw."""
        self._codes[rank] = code
        if self.verdict is None and code not in FINE:
            self._conclude(self._known_error(rank) or self._make("died", rank, code=code))
        elif self.verdict is not None and self.verdict.rank == rank and self.verdict.kind == "died":
            self.verdict = replace(self.verdict, code=code)

    def lost(self, rank: int, host: str) -> None:
        """A node is gone, and this rank with it."""
        self._conclude(Verdict("lost", rank, host, error="is lost with its node", statuses=self.statuses))

    def request_stop(self) -> None:
        """Have every rank stop after the same step."""
        if not self._is_stopping:
            self._is_stopping = True
            for connection in self._connections.values():
                connection.send({"t": "counter?"})

    # conclusions

    def _make(self, kind: str, rank: int, *, code: int | None = None, error: str = "", traceback: str = "") -> Verdict:
        return Verdict(kind, rank, self.hosts.get(rank, ""), error, traceback, code, dict(self.statuses))

    def _note_error(self, rank: int, message: Message) -> None:
        """An exception on a rank; decided a moment later, for another rank's death may be what caused it."""
        kind = "exited" if message.get("kind") == "exited" else "raised"
        error, trace = str(message.get("error")), str(message.get("traceback") or "")
        self._errors.append(self._make(kind, rank, code=message.get("code"), error=error, traceback=trace))
        if self.verdict is None:
            self._loop.call_later(ERROR_GRACE, lambda: self._conclude(self._errors[0]))

    def _known_error(self, rank: int) -> Verdict | None:
        return next((error for error in self._errors if error.rank == rank), None)

    def _conclude(self, verdict: Verdict) -> None:
        if self.verdict is not None or self._is_concluding:
            return
        self.verdict = verdict
        for connection in list(self._connections.values()):
            self._tell_end(connection)
        self._on_verdict(verdict)

    def _tell_end(self, connection: Connection) -> None:
        if self.verdict is not None:
            values = {**self.verdict.to_json(), "traceback": "", "statuses": {}}
            connection.send({"t": "end", "verdict": values, "headline": self.verdict.headline()})

    # hangs

    def _check_for_leavers(self, rank: int) -> None:
        """A rank that ended its program reaches no collective any more: whoever waits for it there waits for ever."""
        if self.statuses.get(rank, {}).get("group") and self._leavers & set(behind(self.statuses, rank)):
            self._begin_dump(rank)

    def _begin_dump(self, overdue: int) -> None:
        if self.verdict is not None or self._is_concluding:
            return
        self._is_concluding = True
        self._waits_for_dump = set(self._connections)
        for connection in self._connections.values():
            connection.send({"t": "dump"})
        self._dumping = self._loop.create_task(self._finish_dump(overdue))

    async def _finish_dump(self, overdue: int) -> None:
        """Wait for the stacks; a rank that cannot write them (stopped, or holding Python's lock) is not waited for."""
        end = self._loop.time() + DUMP_SECONDS
        while self._waits_for_dump and self._loop.time() < end:
            await asyncio.sleep(0.02)
        self._is_concluding = False
        culprit, how = blame(self.statuses, overdue)
        self._conclude(self._make("hung", culprit, error=f"hangs: it {how}"))

    async def _watch_silence(self) -> None:
        """Find ranks that send nothing though their connection stands: stopped, or cut off."""
        pause = min(1.0, self._heartbeat_timeout / 4)
        while self.verdict is None:
            before = self._loop.time()
            await asyncio.sleep(pause)
            now = self._loop.time()
            if now - before > 3 * pause:  # it was this process that stood still: nobody could be heard
                self._heard = dict.fromkeys(self._heard, now)
            for rank in list(self._connections):
                if now - self._heard[rank] > self._heartbeat_timeout:
                    reason = "its process is stopped, native code holds Python's lock, or the network is cut"
                    error = f"has sent no heartbeat for {self._heartbeat_timeout:g} s ({reason})"
                    self._conclude(self._make("silent", rank, error=error))

    # stopping together

    def _agree_on_stop(self) -> None:
        """Once every rank has said how many steps it may take for certain, the step after them is the last one."""
        if any(rank not in self._stop_counters for rank in self._connections):
            return
        last = max((step for step in self._stop_counters.values() if step is not None), default=None)
        for connection in self._connections.values():
            connection.send({"t": "stop_at", "step": None if last is None else last + 1})


def write_report(verdict: Verdict, folder: Path, attempt: int) -> Path:
    """Save a verdict with the last status of every rank as folder/watchdog.attemptN.json; returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"watchdog.attempt{attempt}.json"
    content = {"headline": verdict.headline(), "attempt": attempt, **verdict.to_json()}
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


class HostedMonitor:
    """A monitor in a daemon thread of this process, for jobs that no launcher of ours started."""

    def __init__(self, host: str, world_size: int, heartbeat_timeout: float, folder: Path) -> None:
        self._arguments = (world_size, heartbeat_timeout, folder)
        self._ready = threading.Event()
        self._host = host
        self.address = Address(host, 0)
        self._failure: OSError | None = None
        threading.Thread(target=lambda: asyncio.run(self._run()), name="polyreme-monitor", daemon=True).start()
        self._ready.wait()
        if self._failure is not None:
            raise ConfigError(f"cannot listen on {host} for the watchdog: {self._failure}; check this host's address")

    async def _run(self) -> None:
        world_size, heartbeat_timeout, folder = self._arguments
        monitor = Monitor(world_size, 0, heartbeat_timeout, lambda verdict: _save(verdict, folder), 0)
        try:
            server = await serve(monitor, self._host, 0)
        except OSError as error:
            self._failure = error
            self._ready.set()
            return
        self.address: Address = Address(self._host, server.sockets[0].getsockname()[1])
        self._ready.set()
        await server.serve_forever()


def _save(verdict: Verdict, folder: Path) -> None:
    write_report(verdict, folder, 0)
