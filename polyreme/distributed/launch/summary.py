"""The launcher's report of a failure: the first failing rank, how it ended, where it was, what comes next."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from polyreme.distributed.job.verdict import Verdict, meaning, place, process_code
from polyreme.errors import EXIT_WATCHDOG

SAME_STEP_LIMIT = 3
"""Failures in a row at the same step that show the step itself to be the cause."""
NO_RESTART_CODES = {
    2: "a setting does not mend itself",
    4: "a checkpoint does not mend itself",
    5: "the same numbers would come again",
}
_LONGEST_WAIT = 60.0  # seconds between two attempts


@dataclass(frozen=True)
class Ending:
    """The end of a rank's process; tail is the end of its log, shown if it is on the console already."""

    code: int
    log: str = ""
    tail: str = ""
    shown: bool = False


class Decision(NamedTuple):
    """The launcher's next action: start again after wait seconds, or (wait None) end with the failure's code."""

    wait: float | None
    text: str


def decide(failures: Sequence[Verdict], max_restart: int, backoff: float) -> Decision:
    """After the last of these failures, one an attempt; backoff is the wait before the first restart in seconds."""
    last = failures[-1]
    same = 0
    for failure in reversed(failures):
        if failure.step != last.step:
            break
        same += 1
    where = "before its first step" if last.step is None else f"at step {last.step}"
    batch = f" (batch {last.status['batch']})" if last.status.get("batch") else ""
    if last.code in NO_RESTART_CODES:
        return Decision(None, f"no restart: {NO_RESTART_CODES[last.code]}")
    if same >= SAME_STEP_LIMIT:
        cause = "the step itself is the likely cause: look at its batch" if last.step is not None else "the log says"
        return Decision(None, f"crash loop: {same} failures in a row {where}{batch}; no restart, as {cause}")
    if len(failures) > max_restart:
        hint = f", every time {where}{batch}" if same == len(failures) > 1 else ""
        done = f"all {max_restart} restarts (--max_restart) are used up" if max_restart else "no restart is allowed"
        return Decision(None, f"{done}{hint}")
    wait = min(backoff * 2 ** (len(failures) - 1), _LONGEST_WAIT)
    return Decision(wait, f"restart {len(failures)} of {max_restart} in {wait:g} s")


def failure_text(verdict: Verdict, ending: Ending | None, next_step: str, report: str) -> str:
    """The summary of a failure; ending is of the rank to blame, if its end is known."""
    lines = [f"rank {verdict.rank} failed first{f', on host {verdict.host}' if verdict.host else ''}"]
    if verdict.error:
        lines.append(f"  what:  {verdict.error}")
    if verdict.kind in ("died", "raised", "exited"):
        code = ending.code if ending is not None and verdict.code is None else verdict.code
        lines.append(f"  exit:  {meaning(code)}")
    else:
        lines.append(f"  exit:  ended by the launcher; the job's exit code is {EXIT_WATCHDOG}")
    batch = f"; batch {verdict.status['batch']}" if verdict.status.get("batch") else ""
    lines.append(f"  where: {place(verdict.status)}{batch}")
    if ending is not None and ending.log:
        lines.append(f"  log:   {ending.log}")
    lines.append(f"  all ranks: {report}")
    words = verdict.traceback or (ending.tail if ending is not None and verdict.kind in ("died", "exited") else "")
    if words and not (ending is not None and ending.shown):
        title = "its traceback" if "Traceback" in words else "the end of its log"
        lines += [f"  {title}:", *(f"    {line}" for line in words.rstrip().splitlines())]
    lines.append(f"  next:  {next_step}")
    return "\n".join(lines)


def stopped_code(number: int, codes: Sequence[int]) -> int:
    """Exit code of a job that was asked to stop by a signal: 75 if every rank saved, 0 if every rank was done."""
    if all(code in (0, 75) for code in codes):
        return max(codes, default=128 + number)
    # 255 is what asyncio says of a child that was gone before it could ask how
    if any(code in (-number, 128 + number, -9, 255) for code in codes):
        return 128 + number
    return process_code(next(code for code in codes if code not in (0, 75)))
