"""The device kit: rows and checks handed to worker processes, and what came of them as a report.

A worker gets names one at a time. One that ends is a crash of the row it had, one that takes too long is ended; the
next name goes to a new worker.
"""

from __future__ import annotations

import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from polyreme.conformance.checks import CHECKS
from polyreme.conformance.rows import ROWS
from polyreme.errors import ConfigError, DeviceError

ROWS_A_WORKER = 120
"""Rows after which a worker is replaced: programs that were compiled stay in its memory."""
START_SECONDS = 180.0
WORKER = (sys.executable, "-m", "polyreme.conformance.worker")
STATUSES = ("passed", "failed", "crashed", "timed out", "skipped", "not run")


@dataclass(frozen=True)
class KitOptions:
    """What of the kit is run.

    pattern: shell pattern of names, such as "matmul*"; sample: so many rows drawn at random by seed, 0 for all;
    seconds: no row is begun after that time, 0 for no limit; row_seconds: a row that takes longer is ended; jobs:
    processes at once. compiled: rows are compiled for a device that is not here, and not run (compiling.py).
    """

    pattern: str = "*"
    sample: int = 0
    seed: int = 0
    seconds: float = 0.0
    row_seconds: float = 120.0
    jobs: int = 1
    compiled: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of one row or check. seconds: in the worker, or until it was given up."""

    name: str
    status: str
    seconds: float = 0.0
    detail: str = ""


@dataclass
class DeviceReport:
    """Everything that was found of a device."""

    device: dict[str, Any]
    options: KitOptions
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    def counts(self, names: Sequence[str] | None = None) -> Counter[str]:
        """How many had each status, of these names or of all."""
        return Counter(o.status for o in self.outcomes if names is None or o.name in names)

    @property
    def is_conforming(self) -> bool:
        """Whether nothing failed, and something passed."""
        counts = self.counts()
        return counts["passed"] > 0 and not counts["failed"] + counts["crashed"] + counts["timed out"]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: rows that passed by name alone."""
        by_status = {status: [o for o in self.outcomes if o.status == status] for status in STATUSES}
        return {
            "device": self.device,
            "conforming": self.is_conforming,
            "seconds": round(self.seconds, 1),
            "options": self.options.__dict__,
            "checks": {o.name: [o.status, o.detail] for o in self.outcomes if o.name in CHECKS},
            "rows": {
                status: {o.name: o.detail for o in found if o.name not in CHECKS}
                if status not in ("passed", "not run")
                else [o.name for o in found if o.name not in CHECKS]
                for status, found in by_status.items()
            },
        }

    def page(self) -> str:
        """The report as markdown, for a pull request."""
        facts = self.device
        rows = [o.name for o in self.outcomes if o.name not in CHECKS]
        counts = self.counts(rows)
        verb = "compile" if self.options.compiled else "conform"
        verdict = f"{verb}s" if self.is_conforming else f"does not {verb}"
        lines = [
            f"# {facts['kind']} ({facts['device']}): {verdict}",
            "",
            f"{facts['devices']} device(s) of platform {facts['platform']}, {facts['platform_version']}; jax "
            f"{facts['jax']}, Python {facts['python']}. Factors of float32 products: {facts['factor_bits']} "
            f"significant bits declared. {self.seconds:.0f} s.",
            "",
            f"Rows of the op contract: {len(rows)} of {len(ROWS)} asked for; "
            + ", ".join(f"{counts[s]} {s}" for s in STATUSES if counts[s])
            + ".",
        ]
        checks = [o for o in self.outcomes if o.name in CHECKS]
        if checks:
            lines += ["", "| check | | |", "|---|---|---|"]
            lines += [f"| {o.name.replace('_', ' ')} | {o.status} | {_cell(o.detail)} |" for o in checks]
        bad = [o for o in self.outcomes if o.status in ("failed", "crashed", "timed out") and o.name not in CHECKS]
        if bad:
            lines += ["", "| row | | |", "|---|---|---|"]
            lines += [f"| {o.name} | {o.status} | {_cell(o.detail)} |" for o in sorted(bad, key=lambda o: o.name)]
        return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:240]


def names(options: KitOptions) -> list[str]:
    """What is run, checks first, rows in an order of their own by the seed. ConfigError if nothing has such a name."""
    checks = [name for name in CHECKS if fnmatchcase(name, options.pattern) and not options.compiled]
    rows = [case.id for case in ROWS if fnmatchcase(case.id, options.pattern)]
    if not checks and not rows:
        raise ConfigError(f"device check: no row or check is called {options.pattern!r}; such as matmul* or *kernels*")
    random.Random(options.seed).shuffle(rows)
    return checks + (rows[: options.sample] if options.sample else rows)


def run(device: str, options: KitOptions | None = None, on_outcome: Any = None) -> DeviceReport:
    """Check a device -> DeviceReport. on_outcome is called with each Outcome as it comes, from several threads.

    device: a name such as "gpu:0"; where rows are compiled, a TPU slice such as "v5e:2x2", or "cuda". DeviceError if no
    worker starts on the device, with what it said.
    """
    options = options or KitOptions()
    start = time.monotonic()
    wanted = names(options)
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in wanted:
        waiting.put(name)
    words = ("COMPILE",) if options.compiled else ()
    first = _Worker(device, words, hello=True)
    report = DeviceReport(first.hello, options)
    outcomes: dict[str, Outcome] = {}

    def work(worker: _Worker | None) -> None:
        served = 0
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                break
            if options.seconds and time.monotonic() - start > options.seconds:
                outcomes[name] = Outcome(name, "not run")
                continue
            if worker is None or worker.is_over or served >= ROWS_A_WORKER:
                if worker is not None:
                    worker.end()
                worker, served = _Worker(device, words), 0
            served += 1
            outcomes[name] = worker.ask(name, options.row_seconds)
            if on_outcome is not None:
                on_outcome(outcomes[name])
        if worker is not None:
            worker.end()

    workers = [first, *[None] * (options.jobs - 1)]
    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report.outcomes = [outcomes[name] for name in wanted]
    report.seconds = time.monotonic() - start
    return report


class _Worker:
    """A process of worker.py, and a thread that reads its answers."""

    def __init__(self, device: str, words: tuple[str, ...] = (), hello: bool = False) -> None:
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"} | dict(os.environ)
        command = [*WORKER, device, *words, *(["HELLO"] if hello else [])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
            errors="replace",
        )  # fmt: skip
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._said: list[str] = []
        self._readers = [threading.Thread(target=run, daemon=True) for run in (self._read, self._listen)]
        for reader in self._readers:
            reader.start()
        self._is_fresh = True
        self.is_over = False
        self.hello: dict[str, Any] = {}
        if hello:
            line = self._answer(START_SECONDS)
            if not line:
                self.end()
                raise DeviceError(f"device check: no process starts on {device}: {self._last_words()}")
            self.hello = json.loads(line)

    def ask(self, name: str, seconds: float) -> Outcome:
        """What comes of a name."""
        start = time.monotonic()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(name + "\n")
            self._process.stdin.flush()
        except OSError:  # it is gone; there is no answer
            pass
        line = self._answer(seconds + (START_SECONDS if self._is_fresh else 0))
        self._is_fresh = False
        spent = round(time.monotonic() - start, 3)
        if line:
            return Outcome(**json.loads(line))
        self.is_over = True
        if line is None:
            return Outcome(name, "timed out", spent, f"no answer within {seconds:.0f} s")
        code = self._process.wait()
        self.end()
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        return Outcome(name, "crashed", spent, f"the process ended by {how}: {self._last_words()}")

    def end(self) -> None:
        """End the process."""
        self.is_over = True
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for reader in self._readers:  # their streams have ended
            reader.join(1.0)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            try:
                stream.close()  # type: ignore[union-attr]  (they are pipes)
            except OSError:  # a name that was never read
                continue

    def _answer(self, seconds: float) -> str | None:
        """A line, "" at the end of the process, None if none comes in time."""
        try:
            return self._answers.get(timeout=seconds)
        except queue.Empty:
            return None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said = [*self._said[-20:], line.strip()]

    def _last_words(self) -> str:
        told = [line for line in self._said if line]
        return " | ".join(told[-3:])[-500:] or "nothing on stderr"
