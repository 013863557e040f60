"""One node's part of a launch: starts processes when the coordinator says so, reports their ends, passes signals on.

The coordinator is in the launcher of node 0; every launcher, that one too, has a Node that talks to it.
"""

import asyncio
import logging
import os
import signal
from pathlib import Path

from polyreme import flags
from polyreme.distributed.job.rendezvous import Address, Client, Message, free_port, own_host
from polyreme.distributed.job.verdict import FINE
from polyreme.distributed.launch import devices
from polyreme.distributed.launch.options import Options
from polyreme.distributed.launch.worker import Follower, Worker, command, environment
from polyreme.errors import EXIT_WATCHDOG, ConfigError

LEAVE_SECONDS = 5.0
"""How long ranks that were told to leave may take before they are killed."""
_log = logging.getLogger("polyreme.launch")


class LaunchNode:
    """The processes of this machine."""

    def __init__(self, options: Options, address: Address, is_first: bool) -> None:
        self._options, self._address, self._is_first = options, address, is_first
        self._platform = devices.platform(os.environ)
        self._devices = devices.share_out(self._platform, options.devices, options.num_processes, os.environ)
        self._command = command(options.script, options.arguments, options.is_module)
        self._workers: dict[int, Worker] = {}
        self._inbox: asyncio.Queue[Message | None] = asyncio.Queue()
        self._follower: Follower | None = None
        self._signal: int | None = None
        self._tasks: set[asyncio.Task] = set()
        self._loop = asyncio.get_running_loop()

    async def run(self) -> int:
        """Take part until the coordinator says that the job is over; returns the exit code.

        Raises ConfigError if the coordinator does not answer.
        """
        self._make_log_dir()
        self._client = await self._loop.run_in_executor(None, self._connect)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._note_signal, number)
        try:
            while message := await self._inbox.get():
                if message["t"] == "finish":
                    return int(message["code"])
                await self._handle(message)
            _log.error("the launcher of node 0 at %s is gone; ending the processes of this node", self._address)
            return EXIT_WATCHDOG
        finally:
            for worker in self._workers.values():
                worker.kill()
            self._close_follower()
            self._client.close()

    def _make_log_dir(self) -> None:
        folder = self._options.log_dir
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"launch: --log_dir {folder}: {error.strerror}; give a folder to write to") from None
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"launch: --log_dir {folder}: no permission to write; give another folder")

    def _connect(self) -> Client:
        options, count = self._options, len(self._devices)
        host = options.host or own_host(self._address.host)
        ports: list[int] = []
        for _ in range(count):
            ports.append(free_port(host, ports[-1] + 1 if ports and options.start_port else options.start_port))
        who = {
            "kind": "node",
            "node": 0 if self._is_first else options.node,
            "nodes": [options.min_nodes, options.max_nodes],
            "job": options.job_id,
            "host": host,
            "ports": ports,
        }
        return Client(self._address, who, self._put, lambda: self._put(None), flags.init_timeout())

    def _put(self, message: Message | None) -> None:
        self._loop.call_soon_threadsafe(self._inbox.put_nowait, message)

    async def _handle(self, message: Message) -> None:
        kind = message["t"]
        if kind == "start":
            await self._start(message)
        elif kind == "signal":
            for worker in self._workers.values():
                worker.send_signal(int(message["number"]))
        elif kind == "end":
            self._spawn(self._end(set(message["watched"]), float(message["seconds"])))
        elif kind == "say":
            self._close_follower()
            _log.log(int(message["level"]), "%s", message["text"])

    async def _start(self, plan: Message) -> None:
        backend = devices.backend(self._platform)
        for local_rank, device_variables in enumerate(self._devices):
            rank = plan["first_rank"] + local_rank
            log = self._options.log_dir / f"workerlog.{rank}"
            if self._options.log_overwrite and plan["attempt"] == 0:
                log.write_bytes(b"")
            if local_rank == 0:
                self._follower = Follower(log)
            told = environment(plan, local_rank, len(self._devices), backend, self._options.log_dir)
            worker = await Worker.start(rank, self._command, {**told, **device_variables}, log)
            self._workers[rank] = worker
            self._spawn(self._report_end(worker, plan["attempt"]))
            if self._signal is not None:  # it came while processes were being started
                worker.send_signal(self._signal)

    async def _report_end(self, worker: Worker, attempt: int) -> None:
        code = await worker.wait()
        del self._workers[worker.rank]
        tail = ""
        if code not in FINE:
            worker.kill()  # what it started and could not end
            tail = worker.last_words()
        stacks = self._options.log_dir / f"stacks.rank{worker.rank}.txt"
        if stacks.exists() and stacks.stat().st_size == 0:  # a rank that was killed leaves it
            stacks.unlink()
        self._client.send(
            {
                "t": "exit",
                "rank": worker.rank,
                "code": code,
                "attempt": attempt,
                "log": str(worker.log),
                "tail": tail,
                "shown": self._is_shown(worker.log),
            }
        )

    def _is_shown(self, log: Path) -> bool:
        """Whether this node's console shows that log."""
        return self._follower is not None and self._follower.log == log

    async def _end(self, watched: set[int], seconds: float) -> None:
        """Wait for ranks with a watchdog to leave, ask the others to end, then kill those that remain."""
        for rank, worker in self._workers.items():
            if rank not in watched:
                worker.send_signal(signal.SIGTERM)
        end = self._loop.time() + seconds
        while self._workers and self._loop.time() < end:
            await asyncio.sleep(0.05)
        for worker in self._workers.values():
            worker.kill()

    def _note_signal(self, number: int) -> None:
        if self._signal is None:
            name = signal.Signals(number).name
            _log.warning("%s: all ranks are asked to stop, and may save; once more to kill them", name)
            self._signal = number
            self._client.send({"t": "signal", "number": number})
            return
        self._client.send({"t": "kill"})
        for worker in self._workers.values():
            worker.kill()

    def _spawn(self, work) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _close_follower(self) -> None:
        if self._follower is not None:
            self._follower.close()
            self._follower = None
