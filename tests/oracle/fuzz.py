"""A differential fuzzer: calls drawn from the contract table and changed at random, made in several ways and compared.

    make fuzz                                            # five minutes, a new seed
    python -m tests.oracle.fuzz --seconds 60 --seed 7    # the same calls again

Each call is made eagerly, captured and in a Program; with --paddle INTERPRETER in PaddlePaddle too. It prints each
kind of finding of a function once: another number, shape or dtype; an error that polyreme does not raise on purpose; a
process that ended. What it finds becomes a row of the contract table, and is mended there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from polyreme import errors
from tests.oracle import compare, run
from tests.oracle.calls import Call, op_calls
from tests.oracle.layers import layer_calls
from tests.oracle.mutations import changed, optimizer_calls
from tests.oracle.objects import object_calls

WAYS = ("eager", "captured", "program", "open")
SOURCES = ((op_calls, 0.7), (layer_calls, 0.15), (object_calls, 0.07), (optimizer_calls, 0.08))  # and their shares
BATCH = 240  # calls of a round, those of every way counted, which one process makes
# the classes that say what was asked for, and those of Python that ops raise on purpose
TYPED = {name for name, value in vars(errors).items() if isinstance(value, type)} | {
    *("IndexError", "TypeError", "ValueError", "ZeroDivisionError", "NotImplementedError"),
}
# what Python says of code that met what it did not expect
UNEXPECTED = re.compile(
    "unsupported operand|bad operand|object (is not|has no|cannot be|does not)|(tuple|list) index out of range|"
    "(not enough|too many) values|math domain|invalid literal|ambiguous|is not in list|out of bounds for axis"
)


@dataclass(frozen=True)
class Finding:
    """What is wrong with a call in one way of making it."""

    call: Call
    kind: str
    what: str

    @property
    def key(self) -> tuple[str, str]:
        """What findings are counted by."""
        return self.call.path, self.kind


def judged(call: Call, ways: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """Findings of a call by what came of it in each way."""
    eager = ways["eager"]
    for way in ways:
        error = ways[way].get("error") or ways[way].get("grad_error")
        if error and way != "paddle":
            kind = error.partition(":")[0]
            if error in (run.CRASHED["error"], run.HUNG["error"]):
                yield Finding(call, f"{way}: process", error)
            elif kind not in TYPED or UNEXPECTED.search(error):
                yield Finding(call, f"{way}: {kind}", error)
    for way in WAYS[1:]:
        other = ways.get(way)
        if other is None or "error" in eager:
            continue
        if "error" in other:
            if not other["error"].startswith(("CaptureError", "HostValueError", "ProgramError")):
                yield Finding(call, f"{way}: refuses what eager takes", other["error"])
            continue
        result = compare.compared(call, other, eager)
        if result.kind == compare.DIFFER:
            yield Finding(call, f"{way} is not eager", result.what.replace("PaddlePaddle", "eager"))
    if "paddle" in ways and "error" not in eager and "error" not in ways["paddle"]:
        path, _, tag = (call.row or call.id).partition(":")
        tag += "/complex64" * any(a.dtype.kind == "c" for a in call.arrays())  # as the rows say it
        theirs = ways["paddle"]
        if not all(np.isfinite(a).all() for a in call.arrays() if a.dtype.kind in "fc"):
            theirs = {part: value for part, value in theirs.items() if part != "grads"}  # nobody's derivatives
        result = compare.compared(replace(call, path=path, tag=tag), eager, theirs)
        if result.kind == compare.DIFFER and compare.explanation(result, compare.documented(drawn=True)) is None:
            yield Finding(call, "differs from PaddlePaddle", result.what)


def fuzz(
    seconds: float,
    seed: int,
    folder: Path,
    paddle: str | None = None,
    only: str = "",
    ways: Sequence[str] = WAYS,
) -> Iterator[Finding]:
    """Findings, a round at a time, until so many seconds have passed. ways: of WAYS, the first of them among these."""
    rng, start = np.random.default_rng(seed), time.monotonic()
    tables = [[call for call in drawn() if only in call.path] for drawn, _ in SOURCES]
    weights = np.array([weight if rows else 0.0 for (_, weight), rows in zip(SOURCES, tables, strict=True)])

    def draw() -> Call:
        rows = tables[rng.choice(len(tables), p=weights / weights.sum())]
        return changed(rows[rng.integers(len(rows))], rng)

    while time.monotonic() - start < seconds:
        calls = [call for call in (draw() for _ in range(BATCH // len(ways))) if _is_sent(call)]
        ours = run.outcomes(sys.executable, "polyreme", [_in_way(call, way) for call in calls for way in ways], folder)
        theirs = run.outcomes(paddle, "paddle", calls, folder) if paddle is not None else []
        for number, call in enumerate(calls):
            outcomes = dict(zip(ways, ours[number * len(ways) :], strict=False))
            yield from judged(call, outcomes | ({"paddle": theirs[number]} if theirs else {}))


def _in_way(call: Call, way: str) -> Call:
    return replace(call, way=way, grad=call.grad and way not in ("program", "open"))


def _is_sent(call: Call) -> bool:
    try:
        call.message()
    except TypeError:
        return False
    return True


def main() -> None:
    """Print findings as they come, each kind of a function once."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--paddle", help="an interpreter with paddlepaddle 3.3.1")
    parser.add_argument("--only", default="", help="a part of the paths of the functions to call")
    parser.add_argument("--ways", default=",".join(WAYS), help="how to make each call, eager first")
    options = parser.parse_args()
    ways = options.ways.split(",")
    if ways[0] != "eager" or not set(ways) <= set(WAYS):
        parser.error(f"--ways {options.ways}: give eager and any of {', '.join(WAYS[1:])}")
    known, count = set(), 0
    say = sys.stdout.write
    say(f"seed {options.seed}\n")
    with tempfile.TemporaryDirectory() as folder:
        for finding in fuzz(options.seconds, options.seed, Path(folder), options.paddle, options.only, ways):
            count += 1
            if finding.key not in known:
                known.add(finding.key)
                message = finding.call.message()
                arguments = json.dumps(
                    {name: message[name] for name in ("args", "kwargs", "layer") if name in message}
                )[:600]
                say(f"{finding.call.id}\n  {finding.kind}: {finding.what}\n  {arguments}\n")
                sys.stdout.flush()
    say(f"{count} findings of {len(known)} kinds\n")
    sys.exit(1 if known else 0)


if __name__ == "__main__":
    main()
