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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from polyreme import errors
from tests.oracle import compare, run
from tests.oracle.calls import Call, op_calls

CHANGED = " ~ "  # between the tag of a row and what was changed in it
WAYS = ("eager", "captured", "program")
BATCH = 200  # calls of a round; each way is a process
DTYPES = tuple(
    "bool uint8 int8 int16 int32 int64 float16 float32 float64 complex64 complex128".split()  # noqa: SIM905
)
EDGES = {
    "i": [0, 1, -1, 2, 7],
    "u": [0, 1, 2, 7],
    "f": [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-30, 3.4e38],
    "b": [True, False],
}
INTEGERS = [0, 1, -1, 2, 3, 127, 256, -129, 2**31 - 1, 2**31, -(2**31) - 1, 2**40]
FLOATS = [0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 1e-45, 1e30, float("inf"), -float("inf"), float("nan")]
# the classes that say what was asked for, and those of Python that ops raise on purpose
TYPED = {name for name, value in vars(errors).items() if isinstance(value, type)} | {
    *("IndexError", "TypeError", "ValueError", "ZeroDivisionError", "NotImplementedError"),
}
# what Python says of code that met what it did not expect
UNEXPECTED = re.compile(
    "unsupported operand|bad operand|object (is not|has no|cannot be|does not)|(tuple|list) index out of range|"
    "(not enough|too many) values|math domain|invalid literal|ambiguous|is not in list|out of bounds for axis"
)

Change = Callable[[np.random.Generator, Any], Any]


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


def places(value: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """(where, leaf) of everything in lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from places(part, (*path, number))
        if value and all(isinstance(part, int) for part in value):
            yield path, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from places(part, (*path, name))
    else:
        yield path, value


def put(value: Any, path: tuple, leaf: Any) -> Any:
    """value with another leaf."""
    if not path:
        return leaf
    if isinstance(value, dict):
        return {**value, path[0]: put(value[path[0]], path[1:], leaf)}
    parts = [put(part, path[1:], leaf) if number == path[0] else part for number, part in enumerate(value)]
    return type(value)(parts)


def _cast(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return array.real.astype(rng.choice(DTYPES))


def _with_edge(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    edges = EDGES.get(array.dtype.kind, [])
    if not edges or not array.size:
        return array
    changed = array.copy()
    with np.errstate(all="ignore"):
        changed.reshape(-1)[rng.integers(array.size)] = edges[rng.integers(len(edges))]
        if array.dtype.kind in "iu" and rng.random() < 0.2:
            limits = np.iinfo(array.dtype)
            changed.reshape(-1)[0] = rng.choice([limits.min, limits.max])
    return changed


def _emptied(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    return array.take([], axis=rng.integers(array.ndim)) if array.ndim else array


def _widened(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    return np.expand_dims(array, rng.integers(array.ndim + 1))


def _narrowed(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    return np.asarray(array.take(0, axis=rng.integers(array.ndim))) if array.ndim and array.size else array


def _one_long(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    return array.take([0], axis=rng.integers(array.ndim)) if array.ndim and array.size else array


def _turned(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    return array.transpose(rng.permutation(array.ndim))


ARRAYS: tuple[Change, ...] = (_cast, _with_edge, _with_edge, _emptied, _widened, _narrowed, _one_long, _turned)


def _number(rng: np.random.Generator, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        near = [value - 1, value + 1, -value - 1]
        return int(rng.choice(near)) if rng.random() < 0.6 else int(rng.choice(INTEGERS))
    return float(rng.choice(FLOATS))


def _integers(rng: np.random.Generator, value: Any) -> Any:
    choice = rng.integers(4)
    if choice == 0:
        return value[::-1]
    if choice == 1:
        return value[:-1]
    return type(value)([*value, value[-1]]) if choice == 2 else value[0]


def changed(call: Call, rng: np.random.Generator) -> Call:
    """The call with one to three of its arguments changed."""
    args, kwargs, names = call.args, call.kwargs, []
    for _ in range(rng.integers(1, 4)):
        found = [(w, v) for w, v in places((args, kwargs)) if isinstance(v, (np.ndarray, int, float, list, tuple))]
        if not found:
            break
        where, leaf = found[rng.integers(len(found))]
        if isinstance(leaf, np.ndarray):
            if leaf.dtype.kind not in "biufc":
                continue
            change = ARRAYS[rng.integers(len(ARRAYS))]
        else:
            change = _integers if isinstance(leaf, (list, tuple)) else _number
        args, kwargs = put((args, kwargs), where, change(rng, leaf))
        names.append(f"{change.__name__[1:]}{list(where[1:])}")
    aliased = rng.random() < 0.1
    tag = "+".join([*names, *(["aliased"] if aliased else [])])
    return replace(call, args=args, kwargs=kwargs, tag=f"{call.tag}{CHANGED}{tag}", aliased=aliased)


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
    for way in ("captured", "program"):
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
        row = replace(call, tag=call.tag.partition(CHANGED)[0])
        result = compare.compared(row, eager, ways["paddle"])
        if result.kind == compare.DIFFER and compare.explanation(result, compare.documented()) is None:
            yield Finding(call, "differs from PaddlePaddle", result.what)


def fuzz(seconds: float, seed: int, folder: Path, paddle: str | None = None, only: str = "") -> Iterator[Finding]:
    """Findings, a round at a time, until so many seconds have passed."""
    rng, start = np.random.default_rng(seed), time.monotonic()
    rows = [call for call in op_calls() if only in call.path]
    while time.monotonic() - start < seconds:
        calls = [call for call in (changed(rows[rng.integers(len(rows))], rng) for _ in range(BATCH)) if _is_sent(call)]
        outcomes = {way: run.outcomes(sys.executable, "polyreme", _in_way(calls, way), folder) for way in WAYS}
        if paddle is not None:
            outcomes["paddle"] = run.outcomes(paddle, "paddle", calls, folder)
        for number, call in enumerate(calls):
            yield from judged(call, {way: listed[number] for way, listed in outcomes.items()})


def _in_way(calls: list[Call], way: str) -> list[Call]:
    return [replace(call, way=way, grad=call.grad and way != "program") for call in calls]


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
    options = parser.parse_args()
    known, count = set(), 0
    say = sys.stdout.write
    say(f"seed {options.seed}\n")
    with tempfile.TemporaryDirectory() as folder:
        for finding in fuzz(options.seconds, options.seed, Path(folder), options.paddle, options.only):
            count += 1
            if finding.key not in known:
                known.add(finding.key)
                message = finding.call.message()
                arguments = json.dumps({name: message[name] for name in ("args", "kwargs")})[:400]
                say(f"{finding.call.id}\n  {finding.kind}: {finding.what}\n  {arguments}\n")
                sys.stdout.flush()
    say(f"{count} findings of {len(known)} kinds\n")
    sys.exit(1 if known else 0)


if __name__ == "__main__":
    main()
