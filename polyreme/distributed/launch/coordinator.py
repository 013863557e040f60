"""The launch as a whole: gathers the nodes, starts attempts, ends all ranks when one fails, decides what comes next.

Runs in the launcher of node 0, which also serves the store that launchers and watchdogs talk to.
"""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Iterable
from typing import Any

from polyreme import flags
from polyreme.distributed.job.monitor import Monitor, write_report
from polyreme.distributed.job.rendezvous import Address, Connection, Message, free_port
from polyreme.distributed.job.verdict import Verdict, ending_code
from polyreme.distributed.launch.node import LEAVE_SECONDS
from polyreme.distributed.launch.options import Options
from polyreme.distributed.launch.summary import Ending, decide, failure_text, stopped_code
from polyreme.errors import EXIT_PREEMPTED, ConfigError

STOPPED_SECONDS = 20.0
"""How long after the end of an attempt the launchers may take to report that their processes are gone."""


class Coordinator:
    """Handles the store's clients: launchers itself, ranks through the monitor of the attempt."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._token = flags.job_token() or secrets.token_hex(16)
        self._nodes: dict[int, Connection] = {}
        self._monitor: Monitor | None = None
        self._members: dict[int, Connection] = {}
        self._first_ranks: dict[int, int] = {}
        self._endings: dict[int, Ending] = {}
        self._signal: int | None = None
        self._is_killed = False
        self._changed = asyncio.Event()
        self._failures: list[Verdict] = []

    async def run(self, store: Address) -> int:
        """Launch, with restarts; returns the exit code, which every launcher was told."""
        code = 2
        try:
            code = await self._run(store)
        except ConfigError as error:  # node 0's launcher prints it itself
            self._say(logging.ERROR, str(error), [c for node, c in self._nodes.items() if node != 0])
            raise
        finally:
            for connection in self._nodes.values():
                connection.send({"t": "finish", "code": code})
        return code

    async def _run(self, store: Address) -> int:
        attempt = -1
        while True:
            attempt += 1
            await self._gather(store)
            verdict = await self._attempt(attempt, store)
            codes = [ending.code for ending in self._endings.values()]
            if self._signal is not None:
                return self._tell_stop(stopped_code(self._signal, codes))
            if verdict is None:
                return self._tell_stop(max(codes))
            self._failures.append(verdict)
            decision = decide(self._failures, self._options.max_restart, flags.restart_backoff())
            self._tell_failure(verdict, attempt, decision.text)
            if decision.wait is None:
                return ending_code(verdict)
            await self._pause(decision.wait)
            if self._signal is not None:
                return 128 + self._signal

    # what the server calls

    def token(self, who: Message) -> str:
        """The token that a client must show: for ranks the launcher's, for launchers the one the user gave to all of
        them, if any."""
        return self._token if who["kind"] == "rank" else flags.job_token()

    def refusal(self, who: Message) -> str | None:
        """Why a client cannot come in."""
        if who["kind"] == "rank":
            return "no attempt of the job is running" if self._monitor is None else self._monitor.refusal(who)
        options = self._options
        if who["job"] != options.job_id:
            return f"it belongs to job {who['job']!r}, this is {options.job_id!r}: give every node the same --job_id"
        if who["nodes"] != [options.min_nodes, options.max_nodes]:
            asked = ":".join(map(str, who["nodes"]))
            return f"it was told --nnodes {asked}, node 0 {options.min_nodes}:{options.max_nodes}; give the same to all"
        if who.get("node") in self._nodes:
            return f"node {who['node']} is there already; give every node a --rank of its own"
        if len(self._nodes) >= options.max_nodes:
            return f"all {options.max_nodes} nodes are there already; see --nnodes"
        return None

    def opened(self, connection: Connection) -> None:
        """A launcher or a rank came in."""
        who = connection.who
        if who["kind"] == "rank":
            self._current_monitor().opened(connection)
            return
        if who["node"] < 0:
            taken = {0, *self._nodes}  # 0 is the launcher that serves
            who["node"] = next(node for node in itertools.count() if node not in taken)
        self._nodes[who["node"]] = connection
        self._changed.set()

    def received(self, connection: Connection, message: Message) -> None:
        """A launcher or a rank reports."""
        if connection.who["kind"] == "rank":
            if self._is_current(connection):
                self._current_monitor().received(connection, message)
        elif message.get("t") == "exit":
            self._note_exit(message)
        elif message.get("t") == "signal":
            self._note_signal(int(message["number"]))
        elif message.get("t") == "kill":
            self._is_killed = True
        self._changed.set()

    def closed(self, connection: Connection) -> None:
        """A launcher or a rank is gone."""
        who = connection.who
        if who["kind"] == "rank":
            if self._is_current(connection):
                self._current_monitor().closed(connection)
            return
        node = who["node"]
        self._nodes.pop(node, None)
        if self._members.pop(node, None) is not None and self._monitor is not None:
            first = self._first_ranks[node]
            for rank in range(first, first + len(who["ports"])):
                if rank not in self._endings:
                    self._monitor.lost(rank, who["host"])
                    self._endings[rank] = Ending(-9)
        self._changed.set()

    def _is_current(self, connection: Connection) -> bool:
        return self._monitor is not None and connection.who.get("attempt") == self._monitor.attempt

    def _current_monitor(self) -> Monitor:
        assert self._monitor is not None  # ranks are refused without one
        return self._monitor

    def _note_exit(self, message: Message) -> None:
        if self._monitor is not None and message["attempt"] == self._monitor.attempt:
            rank, code = int(message["rank"]), int(message["code"])
            ending = Ending(code, message["log"], message["tail"], message["shown"])
            self._endings[rank] = ending
            self._monitor.exited(rank, code)

    def _note_signal(self, number: int) -> None:
        if self._signal is None:
            self._signal = number
            if self._options.signals_ranks:  # one more would be the second, which ends them at once
                if self._monitor is not None:
                    self._monitor.request_stop()
                return
            for connection in self._members.values():
                connection.send({"t": "signal", "number": number})

    # steps of a launch

    async def _gather(self, store: Address) -> None:
        """Wait for the nodes: all of them, or the least and then elastic_timeout more."""
        options, loop = self._options, asyncio.get_running_loop()
        end = loop.time() + flags.init_timeout()
        is_elastic = False
        while len(self._nodes) < options.max_nodes:
            if not is_elastic and len(self._nodes) >= options.min_nodes:
                is_elastic, end = True, loop.time() + options.elastic_timeout
            if loop.time() >= end:
                if is_elastic and len(self._nodes) >= options.min_nodes:
                    return
                missing = sorted(set(range(options.min_nodes)) - set(self._nodes))
                raise ConfigError(
                    f"launch: {len(self._nodes)} of {options.min_nodes} nodes came to {store} within "
                    f"{flags.init_timeout()} s; missing: {', '.join(map(str, missing))}. Start their launchers with "
                    f"--master {store}, or see whether a firewall keeps them out (POLYREME_INIT_TIMEOUT sets the wait)"
                )
            await self._wait(min(1.0, end - loop.time()))

    async def _attempt(self, attempt: int, store: Address) -> Verdict | None:
        """Start the job, wait for its end and clear up; the verdict if it failed."""
        self._endings = {}
        plan = self._plan(attempt, store)
        self._monitor = monitor = Monitor(
            plan["world"], attempt, flags.heartbeat_timeout(), lambda _: self._changed.set()
        )
        self._say(logging.INFO, f"attempt {attempt}: ranks {plan['world']}, nodes {plan['nodes']}, store {store}")
        for node, connection in self._members.items():
            connection.send({"t": "start", "first_rank": self._first_ranks[node], **plan})
        if self._signal is not None:
            self._members[0].send({"t": "signal", "number": self._signal})
        await self._watch(plan["world"])
        if len(self._endings) < plan["world"]:
            await self._clear_up(plan["world"])
        monitor.close()
        self._monitor = None
        return monitor.verdict

    def _plan(self, attempt: int, store: Address) -> dict[str, Any]:
        self._members = dict(sorted(self._nodes.items()))
        self._first_ranks, world, endpoints = {}, 0, []
        for node, connection in self._members.items():
            host, ports = connection.who["host"], connection.who["ports"]
            self._first_ranks[node] = world
            world += len(ports)
            endpoints += [str(Address(host, port)) for port in ports]
        host, start = self._members[0].who["host"], self._options.start_port
        taken = self._members[0].who["ports"]
        master = Address(host, free_port(host, max(taken) + 1 if start else None))
        return {
            "attempt": attempt,
            "world": world,
            "nodes": len(self._members),
            "master": str(master),
            "store": str(store),
            "endpoints": endpoints,
            "token": self._token,
        }

    async def _watch(self, world: int) -> None:
        """Return when every rank ended, or one failed, or the time to save after a signal is over."""
        monitor, loop = self._current_monitor(), asyncio.get_running_loop()
        end: float | None = None
        while len(self._endings) < world and not self._is_killed:
            if monitor.verdict is not None and self._signal is None:
                return
            if self._signal is not None:
                end = end or loop.time() + flags.stop_grace()
                if loop.time() >= end:
                    self._say(logging.ERROR, f"ranks did not end within {flags.stop_grace():g} s (POLYREME_STOP_GRACE)")
                    self._is_killed = True
            await self._wait(1.0 if end is None else max(0.0, min(1.0, end - loop.time())))

    async def _clear_up(self, world: int) -> None:
        """End the ranks that are left and wait for the news that they are gone."""
        loop = asyncio.get_running_loop()
        seconds = 0.0 if self._is_killed else LEAVE_SECONDS
        for connection in self._members.values():
            connection.send({"t": "end", "watched": self._current_monitor().watched, "seconds": seconds})
        end = loop.time() + STOPPED_SECONDS
        while len(self._endings) < world and loop.time() < end:
            await self._wait(0.5)

    async def _pause(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self._signal is None and loop.time() < end:
            await self._wait(end - loop.time())

    async def _wait(self, seconds: float) -> None:
        """Until something changes, seconds at most."""
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return
        self._changed.clear()

    def _tell_failure(self, verdict: Verdict, attempt: int, next_step: str) -> None:
        report = write_report(verdict, self._options.log_dir, attempt)
        ending = self._endings.get(verdict.rank)
        self._say(logging.ERROR, failure_text(verdict, ending, next_step, str(report)))

    def _tell_stop(self, code: int) -> int:
        if code == EXIT_PREEMPTED:
            self._say(
                logging.WARNING, "stopped on request, state saved (exit code 75); the same command goes on from it"
            )
        elif code:
            self._say(logging.WARNING, f"stopped by a signal, exit code {code}")
        return code

    def _say(self, level: int, text: str, nodes: Iterable[Connection] | None = None) -> None:
        for connection in self._nodes.values() if nodes is None else nodes:
            connection.send({"t": "say", "level": level, "text": text})
