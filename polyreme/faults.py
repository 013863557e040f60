"""Named points at which a test can make polyreme fail: killed, raising, hung or slow.

FAULTS="ckpt.rename:kill@2,data.worker:hang@17" lists faults as POINT:ACTION[=ARGUMENT][@N].

Actions: kill (SIGKILL to this process), raise (FaultInjected), raise=ENOSPC (OSError with that errno), hang (for ever),
delay=0.5 (seconds). @N picks the point's index where the caller gives one (a step, a sample id), else its N-th passing
in this process, from 1; without @N every passing fires. Before POINT, "rank1:" keeps a fault to one rank of a job:
FAULTS="rank1:train.step:kill@7" (the rank is PADDLE_TRAINER_ID).
"""

import errno
import functools
import os
import re
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from polyreme.errors import ConfigError
from polyreme.flags import faults as faults_text
from polyreme.flags import trainer_id

ACTIONS = ("kill", "raise", "hang", "delay")
_FAULT = re.compile(r"(rank(?P<rank>\d+):)?(?P<point>[\w.-]+):(?P<action>\w+)(=(?P<argument>[\w.]+))?(@(?P<at>\d+))?")


class FaultInjected(RuntimeError):
    """Raised by a point whose fault is "raise"."""


def point(name: str, index: int | None = None) -> None:
    """Pass a named point; does nothing unless FAULTS in the environment names it.

    index is what @N is compared with (a step, a sample id); without it the passings are counted.
    """
    text = faults_text()
    if text:
        _plan(text).passing(name, index)


@dataclass(frozen=True)
class Fault:
    """What happens at one point; turn is an index or a passing, None means every one."""

    action: str
    argument: str | None
    turn: int | None

    def fire(self, where: str) -> None:
        """Do what the fault says; returns only from a delay."""
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.action == "raise" and self.argument:
            number = getattr(errno, self.argument)
            raise OSError(number, f"{os.strerror(number)} (injected at {where})")
        elif self.action == "raise":
            raise FaultInjected(f"fault injected at {where} by FAULTS={faults_text()!r}")
        elif self.action == "delay":
            time.sleep(float(self.argument or 0))
        else:
            while True:
                time.sleep(3600)


@dataclass
class _Plan:
    faults: dict[str, list[Fault]]
    passings: Counter = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def passing(self, name: str, index: int | None) -> None:
        if name not in self.faults:
            return
        with self.lock:
            self.passings[name] += 1
            here = self.passings[name] if index is None else index
        for fault in self.faults[name]:
            if fault.turn is None or fault.turn == here:
                fault.fire(f"{name}@{here}")


@functools.lru_cache(maxsize=1)
def _plan(text: str) -> _Plan:
    faults: dict[str, list[Fault]] = {}
    for entry in text.split(","):
        match = _FAULT.fullmatch(entry.strip())
        if match is None or match["action"] not in ACTIONS or not _argument_fits(match["action"], match["argument"]):
            raise ConfigError(
                f"FAULTS entry {entry!r} in the environment: needs [rankR:]POINT:ACTION[=ARGUMENT][@N] with an action "
                f"of {', '.join(ACTIONS)}; raise may name an errno (raise=ENOSPC), delay needs seconds (delay=0.5)"
            )
        if match["rank"] and int(match["rank"]) != trainer_id():
            continue
        at = int(match["at"]) if match["at"] else None
        faults.setdefault(match["point"], []).append(Fault(match["action"], match["argument"], at))
    return _Plan(faults)


def _argument_fits(action: str, argument: str | None) -> bool:
    if action == "delay":
        return argument is not None and re.fullmatch(r"\d+(\.\d*)?|\.\d+", argument) is not None
    if action == "raise":
        return argument is None or argument in errno.errorcode.values()
    return argument is None
