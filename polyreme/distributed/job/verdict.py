"""Why a job of several ranks must end, and which rank is to blame: values and pure functions over what ranks reported.

A Status is what a rank says of itself (see progress.py); a Verdict is what the monitor concludes, once.
"""

import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from polyreme.errors import EXIT_INTERNAL, EXIT_PREEMPTED, EXIT_WATCHDOG

Status = Mapping[str, Any]
"""step, batch, phase, detail, group, number, ranks, age (seconds), counts (collectives entered, by group)."""

FINE = (0, EXIT_PREEMPTED)
"""Exit codes of a rank that did what it should."""

_CODES = {
    1: "Python's code for an uncaught exception",
    2: "a setting or argument it could not use",
    3: "bad or missing data",
    4: "a checkpoint that is missing, torn or does not fit",
    5: "a number that was not finite",
    70: "an uncaught exception",
    75: "stopped on request, state saved",
    86: "ended by its watchdog",
    126: "the script cannot be executed",
    127: "command not found",
}
_SIGNALS = {
    signal.SIGKILL: "from outside; often the kernel, out of memory: see dmesg",
    signal.SIGTERM: "asked to end from outside",
    signal.SIGINT: "interrupted",
    signal.SIGSEGV: "invalid memory access in native code",
    signal.SIGBUS: "memory that could not be had, such as a full /dev/shm",
    signal.SIGABRT: "native code gave up; its last lines say why",
}


@dataclass(frozen=True)
class Verdict:
    """Why an attempt ends. code is as in subprocess: an exit code, or minus a signal's number; None if unknown.

    kind is raised, exited (sys.exit with an error), died, hung, silent (no heartbeat) or lost (its node is gone).
    """

    kind: str
    rank: int
    host: str = ""
    error: str = ""
    traceback: str = ""
    code: int | None = None
    statuses: Mapping[int, Status] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        """The last known status of the rank to blame."""
        return self.statuses.get(self.rank, {})

    @property
    def step(self) -> int | None:
        """The step it was in."""
        return self.status.get("step")

    def headline(self) -> str:
        """One line: which rank, what happened to it, where."""
        what = {
            "raised": f"raised {self.error}",
            "exited": f"left with {meaning(self.code)}",
            "died": "died: its process is gone" if self.code is None else f"died of {meaning(self.code)}",
        }.get(self.kind, self.error)
        return f"rank {self.rank}{f' on {self.host}' if self.host else ''} {what}; it was {place(self.status)}"

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON values."""
        return {**asdict(self), "statuses": {str(rank): dict(status) for rank, status in self.statuses.items()}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Verdict":
        """The verdict from the values of to_json."""
        return cls(**{**values, "statuses": {int(rank): status for rank, status in values["statuses"].items()}})


def meaning(code: int | None) -> str:
    """An exit code or signal in words.

    >>> meaning(-9)
    'SIGKILL (from outside; often the kernel, out of memory: see dmesg)'
    >>> meaning(3)
    'exit code 3 (bad or missing data)'
    """
    if code is None:
        return "an unknown exit code"
    if code >= 0:
        return f"exit code {code}" + (f" ({_CODES[code]})" if code in _CODES else "")
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"signal {-code}"
    return number.name + (f" ({_SIGNALS[number]})" if number in _SIGNALS else "")


def process_code(code: int | None) -> int:
    """The exit code that stands for a rank's end: its own, 128 + a signal's number, 70 if unknown."""
    if code is None:
        return EXIT_INTERNAL
    return code if code >= 0 else 128 - code


def ending_code(verdict: Verdict) -> int:
    """The exit code of a job that a verdict ended: 86 for what only the watchdog saw, else the rank's own."""
    return EXIT_WATCHDOG if verdict.kind in ("hung", "silent", "lost") else process_code(verdict.code)


def place(status: Status) -> str:
    """The place of a rank in its run, in words.

    >>> place({"step": 7, "phase": "all_reduce", "group": "world", "number": 42})
    'at step 7, in all_reduce #42 of group world'
    >>> place({})
    'before its first step'
    """
    step, phase = status.get("step"), status.get("phase")
    where = "before its first step" if step is None else f"at step {step}"
    if phase is None:
        return where
    number = f" #{status['number']} of group {status['group']}" if status.get("group") else ""
    detail = f" ({status['detail']})" if status.get("detail") else ""
    return f"{where}, in {phase}{number}{detail}"


def blame(statuses: Mapping[int, Status], overdue: int) -> tuple[int, str]:
    """The rank that holds up the rank overdue, and how: whoever did not reach the collective that it waits in.

    Follows the chain: a rank that is behind may itself wait for another one.
    """
    rank, seen, how = overdue, {overdue}, ""
    while late := [other for other in behind(statuses, rank) if other not in seen]:
        others = f" (nor did ranks {', '.join(map(str, late[1:]))})" if late[1:] else ""
        how = _never_reached(statuses, late[0], rank) + others
        rank = late[0]
        seen.add(rank)
    if how:
        return rank, how
    waiting = [other for other, status in statuses.items() if status.get("group") and rank in behind(statuses, other)]
    return rank, _never_reached(statuses, rank, waiting[0]) if waiting else _alone(statuses, rank)


def _never_reached(statuses: Mapping[int, Status], rank: int, waiting: int) -> str:
    status = statuses[waiting]
    what = f"{status['phase']} #{status['number']} of group {status['group']}" if status.get("group") else ""
    left = " and has left" if statuses[rank].get("leaving") else ""
    return f"never reached {what or 'step ' + str(status.get('step'))}{left}, where rank {waiting} waits"


def behind(statuses: Mapping[int, Status], rank: int) -> list[int]:
    """Ranks that have not reached what a rank waits in, those furthest behind first."""
    status = statuses[rank]
    group = status.get("group")
    if group:
        members = status.get("ranks") or list(statuses)
        reached = {r: statuses[r].get("counts", {}).get(group, 0) for r in members if r in statuses}
        wanted = status["number"]
    else:
        if status.get("phase") or status.get("step") is None:
            return []  # busy with something of its own
        reached = {r: s["step"] for r, s in statuses.items() if s.get("step") is not None}
        wanted = status["step"]
    return sorted((r for r, count in reached.items() if count < wanted), key=lambda r: (reached[r], r))


def _alone(statuses: Mapping[int, Status], rank: int) -> str:
    status = statuses[rank]
    age = f"for {status.get('age', 0):.0f} s"
    if status.get("group"):
        return f"has waited {age}, though every rank reached that collective: the network, or arguments that differ"
    return f"has made no progress {age}"
