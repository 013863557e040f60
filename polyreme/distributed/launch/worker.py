"""One local process: its command and environment, its log, and how it is ended."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyreme.distributed.job.rendezvous import Message
from polyreme.errors import ConfigError

_EXEC = Path(__file__).with_name("exec_worker.py")
_POLL = 0.05  # seconds between two looks at a log
TAIL_LINES = 25
"""How many last lines of a failing rank's log are shown, if it told no traceback."""


def command(script: str, arguments: Sequence[str], is_module: bool = False) -> list[str]:
    """The command that runs a script: Python files and modules by this Python, anything else by itself."""
    if is_module:
        return [sys.executable, "-u", "-m", script, *arguments]
    if script.endswith(".py"):
        return [sys.executable, "-u", script, *arguments]
    if not os.access(script, os.X_OK):
        raise ConfigError(
            f"launch: {script} is neither a .py file nor executable; chmod +x it, or give a Python script"
        )
    return [str(Path(script).absolute()), *arguments]


def environment(plan: Message, local_rank: int, num_local: int, backend: str, log_dir: Path) -> dict[str, str]:
    """The environment of a worker: the job, and its place in it."""
    rank = plan["first_rank"] + local_rank
    endpoints = plan["endpoints"]
    return {
        "PADDLE_MASTER": plan["master"],
        "PADDLE_GLOBAL_SIZE": str(plan["world"]),
        "PADDLE_LOCAL_SIZE": str(num_local),
        "PADDLE_GLOBAL_RANK": str(rank),
        "PADDLE_LOCAL_RANK": str(local_rank),
        "PADDLE_NNODES": str(plan["nodes"]),
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(plan["world"]),
        "PADDLE_RANK_IN_NODE": str(local_rank),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_DISTRI_BACKEND": backend,
        "PADDLE_LOG_DIR": str(log_dir.absolute()),
        "POLYREME_STORE": plan["store"],
        "POLYREME_ATTEMPT": str(plan["attempt"]),
        "POLYREME_JOB_TOKEN": plan["token"],
        "PYTHONUNBUFFERED": "1",
    }


class Worker:
    """A running process of a rank."""

    rank: int
    log: Path

    def __init__(self, rank: int, process: asyncio.subprocess.Process, log: Path, log_start: int) -> None:
        self.rank, self.log = rank, log
        self._process = process
        self._log_start = log_start

    @classmethod
    async def start(cls, rank: int, words: Sequence[str], variables: Mapping[str, str], log: Path) -> "Worker":
        """Start a process whose output goes to the end of log, in a session of its own: Ctrl-C reaches the launcher."""
        with log.open("ab") as output:
            start = output.tell()
            process = await asyncio.create_subprocess_exec(
                *[sys.executable, "-I", "-S", str(_EXEC), str(os.getpid()), *words],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        return cls(rank, process, log, start)

    async def wait(self) -> int:
        """Exit code, or minus the number of the signal that ended it."""
        return await self._process.wait()

    def send_signal(self, number: int) -> None:
        """To the rank alone; its children are its own business."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """End the rank and every process it started and left in its group, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """The traceback that ends this attempt's log, else the log's last lines."""
        with self.log.open("rb") as file:
            file.seek(max(self._log_start, self.log.stat().st_size - 64_000))
            lines = file.read().decode(errors="replace").splitlines()
        starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
        return "\n".join(lines[starts[-1] :][:60] if starts else lines[-TAIL_LINES:])


class Follower:
    """Copies what is added to a log to this process's standard output, in a thread: a full pipe stops nobody else."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._position = log.stat().st_size if log.exists() else 0
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="polyreme-follow", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_done.wait(_POLL)
            if self.log.exists():
                with self.log.open("rb") as file:
                    file.seek(self._position)
                    data = file.read()
                self._position += len(data)
                try:
                    sys.stdout.buffer.write(data)
                    sys.stdout.buffer.flush()
                except OSError:  # whoever read our output is gone; the log has it all
                    return

    def close(self) -> None:
        """Copy the rest and stop; waits two seconds at most."""
        self._is_done.set()
        self._thread.join(2.0)
