"""The interface between the launcher and a scheduler, and the description of a job."""

from __future__ import annotations

import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from polyreme.distributed.job.rendezvous import Address
from polyreme.errors import ConfigError, did_you_mean

EXIT_CODE_FILE = "exit_code"
"""In the folder of logs: the job's exit code, written by node 0's launcher. A scheduler tells only that of the launcher
that ended worst, and one of a lost node ends badly in a job that went on without it and was done."""


class NodePlace(NamedTuple):
    """A launcher's place in a job: its node's number and how many there are.

    host: its own address; master: where node 0 listens; job_id: the scheduler's. None where a scheduler does not tell.
    """

    node: int
    nodes: int | None = None
    host: str | None = None
    master: Address | None = None
    job_id: str | None = None


@dataclass(frozen=True)
class Submission:
    """A job to hand to a scheduler.

    words: of the command line of a node's launcher, its place excepted. settings: the scheduler's own, by name. grace:
    seconds that ranks have to save once they are asked to stop. is_dry: print what would be submitted, submit nothing.
    waits: until the job has ended.
    """

    words: tuple[str, ...]
    min_nodes: int = 1
    max_nodes: int = 1
    job_id: str = "default"
    log_dir: Path = field(default_factory=lambda: Path("log"))
    max_restart: int = 3
    grace: float = 300.0
    settings: Mapping[str, str] = field(default_factory=dict)
    is_dry: bool = False
    waits: bool = False

    @property
    def name(self) -> str:
        """The job's name for the scheduler."""
        return "polyreme" if self.job_id == "default" else self.job_id

    @property
    def is_elastic(self) -> bool:
        """Whether it goes on with fewer nodes."""
        return self.min_nodes < self.max_nodes

    def command(self, *place: str, python: str = sys.executable) -> list[str]:
        """Command line of a node's launcher; place: flags that say which node it is."""
        return [python, "-u", "-m", "polyreme.distributed.launch", *place, *self.words]


class Scheduler(ABC):
    """Starts one launcher on each node of a job, which then do the rest.

    takes: names of its settings, () for any. signals_ranks: whether a signal that it sends to a launcher goes to the
    processes of its ranks too.
    """

    name: str
    takes: tuple[str, ...] = ()
    signals_ranks = False

    @abstractmethod
    def place(self, environment: Mapping[str, str]) -> NodePlace | None:
        """This launcher's place, if one of the scheduler's jobs runs it. Raises ConfigError for a job that runs several
        launchers on a node."""

    def holds_nodes(self, environment: Mapping[str, str]) -> bool:
        """Whether this process may start launchers on several nodes that are allocated already."""
        return False

    @abstractmethod
    def submit(self, job: Submission) -> int:
        """Have the job's launchers started; returns an exit code: the job's, if it waits for its end.

        Raises ConfigError for settings whose values it does not take, and for programs that are not here.
        """


def read_settings(text: str, source: str) -> dict[str, str]:
    """Settings of a scheduler, NAME=VALUE or NAME, separated by blanks.

    >>> read_settings("time=1:00:00 --exclusive comment='of a person'", "--job_options")
    {'time': '1:00:00', 'exclusive': '', 'comment': 'of a person'}
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"launch: {source} {text!r}: {error}; quote values as a shell takes them") from None
    settings: dict[str, str] = {}
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        if not name.replace("-", "").replace("_", "").replace(".", "").replace("/", "").isalnum():
            raise ConfigError(f"launch: {source} {text!r}: {word!r} is not NAME=VALUE")
        if name in settings:
            raise ConfigError(f"launch: {source} {text!r}: {name} is given twice")
        settings[name] = value
    return settings


def check_settings(scheduler: Scheduler, settings: Mapping[str, str]) -> None:
    """Raise ConfigError for a setting that the scheduler has not."""
    for name in settings:
        if scheduler.takes and name not in scheduler.takes:
            raise ConfigError(
                f"launch: --job_options {name}: --on {scheduler.name} has none of that name"
                f"{did_you_mean(name, scheduler.takes)}"
            )


def count_of(settings: Mapping[str, str], name: str) -> int:
    """A setting that is a whole number; 0 if it is not given."""
    text = settings.get(name, "0")
    if not text.isdigit():
        raise ConfigError(f"launch: --job_options {name}={text}: needs a whole number")
    return int(text)


def joined_code(folder: Path, code: int) -> int:
    """The exit code that node 0's launcher left in the folder of logs, else code."""
    path = folder / EXIT_CODE_FILE
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdigit() else code
