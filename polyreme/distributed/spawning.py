"""spawn: run a function in several processes of this machine, each a rank of one job.

The first rank that fails is named, with its traceback; the others are ended.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from polyreme import flags
from polyreme.errors import EXIT_WATCHDOG, ConfigError, RankError, did_you_mean

_GRACE = 3.0  # seconds between asking a rank to end and ending it; jax may hold SIGTERM back
_SETTLE = 1.0  # seconds in which other ranks may report an earlier failure than the one seen first
_COUNT = "xla_force_host_platform_device_count"
_OPTIONS = ("start_method", "cpu_num", "gpus", "master_port", "env")


def spawn(
    func: Callable[..., Any],
    args: Iterable[Any] = (),
    nprocs: int = -1,
    join: bool = True,
    daemon: bool = False,
    **options: Any,
) -> MultiprocessContext:
    """Run func(*args) in nprocs new processes, rank 0..nprocs-1, which call init_parallel_env to meet.

    nprocs=-1: one for each accelerator, or for each of CPU_NUM processors. join: wait for all; else the caller joins
    the context returned. daemon: end them with this process. func must be importable, and args must pickle. options:
    cpu_num (virtual CPU devices of each process, 1), gpus ("0,1": an accelerator for each process, by default that of
    its rank), master_port (where they meet; a free one by default), env (more environment variables; those that spawn
    sets itself are its own), start_method ("spawn", the only one).

    Raises ConfigError for settings that do not fit; from the join, RankError with the traceback of the rank that failed
    first, after ending the others.
    """
    _check(func, options)
    devices = _devices(options.get("gpus"))
    count = _count(nprocs, devices)
    if devices is not None and len(devices) < count:
        raise ConfigError(
            f"spawn: {count} processes, but gpus={options['gpus']!r} names {len(devices)}; give one for each"
        )
    ports = _free_ports(count + 1)
    master = options.get("master_port") or ports[-1]
    context = multiprocessing.get_context("spawn")
    started = MultiprocessContext([], [])
    try:
        for rank in range(count):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(func, tuple(args), there), daemon=daemon, name=f"rank-{rank}")
            settings = _environment(rank, count, ports, master, devices, options)
            with _settings(settings):
                process.start()
            there.close()
            started.processes.append(process)
            started.reports.append(here)
    except BaseException:
        started.end()
        raise
    if join:
        started.join()
    return started


class MultiprocessContext:
    """The processes that spawn started."""

    def __init__(self, processes: list[SpawnProcess], reports: list[Connection]) -> None:
        self.processes = processes
        self.reports = reports

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the processes; True once all have ended well, False if timeout seconds went by first.

        Raises RankError with the traceback of the rank that failed first; the others are ended, as they are if this
        process is interrupted.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while running := [p for p in self.processes if p.exitcode is None]:
                left = None if deadline is None else max(deadline - time.monotonic(), 0)
                if not wait([p.sentinel for p in running], left):
                    return False
                for process in running:
                    process.join(0)
                if any(p.exitcode for p in self.processes):
                    break
        except BaseException:
            self.end()
            raise
        if any(p.exitcode for p in self.processes):
            raise self._failure()
        return True

    def end(self) -> None:
        """End all processes that still run."""
        for process in self.processes:
            if process.exitcode is None:
                process.terminate()
        deadline = time.monotonic() + _GRACE
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
            if process.exitcode is None:
                process.kill()
                process.join()

    def _failure(self) -> RankError:
        """The error of the rank that failed first, by the clock of the machine they share."""
        wait([p.sentinel for p in self.processes if p.exitcode is None], _SETTLE)
        codes = [p.exitcode for p in self.processes]
        self.end()
        said = [(*_receive(report), rank) for rank, report in enumerate(self.reports)]
        failed = [(when, rank, text) for when, text, rank in said if text]
        if failed:
            _, rank, text = min(failed)
            return RankError(f"rank {rank} of {len(codes)} failed first:\n\n{text}")
        # a rank that says nothing was killed or left by itself; its watchdog ends another only because of it
        silent = [rank for rank, code in enumerate(codes) if code]
        rank = min(silent, key=lambda r: codes[r] == EXIT_WATCHDOG)
        return RankError(f"rank {rank} of {len(codes)} ended {_ending(codes[rank])} and said nothing")


def _ending(code: int | None) -> str:
    return f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"


def _receive(report: Connection) -> tuple[float, str]:
    """(when, the traceback) that a rank reported; no text if it did not."""
    try:
        if not report.poll():
            return 0.0, ""
        when, _, text = report.recv_bytes().decode(errors="replace").partition("\n")
        return float(when), text
    except (EOFError, OSError, ValueError):
        return 0.0, ""


def _run(func: Callable[..., Any], args: tuple, report: Connection) -> None:
    """The main function of each process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        func(*args)
    except BaseException as error:  # noqa: BLE001  (whatever ends a rank is reported)
        if isinstance(error, SystemExit) and not error.code:
            return
        report.send_bytes(f"{time.time()}\n{traceback.format_exc()}".encode())
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # at exit jax would wait for ranks that wait for this one
        os._exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _check(func: Any, options: dict[str, Any]) -> None:
    if not callable(func):
        raise ConfigError(f"spawn: needs a function, got {type(func).__name__}")
    for name in options:
        if name not in _OPTIONS:
            raise ConfigError(f"spawn({name}=...): no such option{did_you_mean(name, _OPTIONS)}")
    _check_env(options.get("env", {}))
    if options.get("start_method", "spawn") != "spawn":
        raise ConfigError(
            f"spawn(start_method={options['start_method']!r}): only 'spawn' works; a forked process would share XLA's "
            "threads"
        )


def _check_env(env: dict[str, Any]) -> None:
    """Refuse variables that say who a rank is or what devices it has, but as this process has them: a copy of its
    environment may be given.
    """
    said = {name: str(value) for name, value in env.items() if str(value) != os.environ.get(name)}
    instead = {"CPU_NUM": "cpu_num", "FLAGS_selected_gpus": "gpus", "PADDLE_MASTER": "master_port"}
    for name in _environment(0, 1, [0], 0, None, {}):
        if name in said:
            advice = f"give {instead[name]}=" if name in instead else "leave it out"
            raise ConfigError(f"spawn(env={{{name!r}: {said[name]!r}}}): spawn sets it for each rank; {advice}")
    if _COUNT in said.get("XLA_FLAGS", ""):
        raise ConfigError(f"spawn(env={{'XLA_FLAGS': '... {_COUNT} ...'}}): spawn sets it for each rank; give cpu_num=")


def _devices(gpus: str | None) -> list[int] | None:
    if gpus is None:
        return None
    parts = str(gpus).split(",")
    if not all(p.strip().isdigit() for p in parts):
        raise ConfigError(f"spawn(gpus={gpus!r}): needs device indexes such as '0,1'")
    return [int(p) for p in parts]


def _count(nprocs: Any, devices: list[int] | None) -> int:
    if nprocs == -1:
        return len(devices) if devices is not None else flags.cpu_num() or _device_count()
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs < 1:
        raise ConfigError(f"spawn(nprocs={nprocs!r}): needs a number of processes, or -1 for one a device")
    return nprocs


def _device_count() -> int:
    """Number of devices here, asked in a process of its own: this one would keep them from those to come."""
    asked = subprocess.run(
        [sys.executable, "-c", "import jax; print(jax.local_device_count())"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(asked.stdout.split()[-1])


def _environment(
    rank: int, count: int, ports: list[int], master: int, devices: list[int] | None, options: dict[str, Any]
) -> dict[str, str]:
    endpoints = [f"127.0.0.1:{port}" for port in ports[:count]]
    variables = {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(count),
        "PADDLE_MASTER": f"127.0.0.1:{master}",
        "PADDLE_LOCAL_RANK": str(rank),
        "PADDLE_RANK_IN_NODE": str(rank),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "CPU_NUM": str(options.get("cpu_num", 1)),
        # of no consequence where there is none
        "FLAGS_selected_gpus": str(rank if devices is None else devices[rank]),
    }
    return {**{k: str(v) for k, v in options.get("env", {}).items()}, **variables}


@contextlib.contextmanager
def _settings(settings: dict[str, str]) -> Iterator[None]:
    """A new process starts with the environment its parent has at that moment."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        ports = []
        for _ in range(count):
            probe = held.enter_context(contextlib.closing(socket.socket()))
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
        return ports
