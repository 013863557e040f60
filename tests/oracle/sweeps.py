"""Sweeps over the numeric API beside PaddlePaddle: every call of the contract table, changed in one way each time.

    python -m tests.oracle.sweeps dtypes --paddle INTERPRETER
    python -m tests.oracle.sweeps values --paddle INTERPRETER --only linalg

`values` runs code instead: the lines of values/*.txt, which give keywords values that no row has, one by one, in eager
code with gradients, in eager code with second derivatives, and in a Program.

Beside the numbers, which `make oracle` compares too, it prints what each side refuses that the other takes. What a
sweep finds becomes a row of the contract table, or a departure in differences.txt here or in docs/paddle_scripts.md.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.core import spelling
from tests.oracle import compare, run
from tests.oracle.calls import Call, op_calls
from tests.oracle.mutations import parameters, places, put
from tests.oracle.side import View

DTYPES = tuple(
    "float16 bfloat16 float64 bool uint8 int8 int16 int32 int64 complex64 complex128".split()  # noqa: SIM905
)


def rows() -> Iterator[Call]:
    """The contract rows as they are, the first two of each function."""
    seen: dict[str, int] = {}
    for call in op_calls():
        if "/" not in call.tag and seen.setdefault(call.path, 0) < 2:
            seen[call.path] += 1
            yield call


def _changed(value: Any, change: Callable[[np.ndarray], Any]) -> Any:
    if isinstance(value, np.ndarray):
        return change(value)
    return type(value)(_changed(v, change) for v in value) if isinstance(value, (list, tuple)) else value


def in_dtype(array: np.ndarray, old: str, new: str) -> np.ndarray | View:
    """The array in another dtype, if it has the old one; fractions are doubled before they are cut."""
    if array.dtype.name != old:
        return array
    real = array.real if array.dtype.kind == "c" else array
    if new == "bfloat16":
        return View(real.astype("float32"), new)
    if new == "bool":
        return real > 0.3
    cut = real.dtype.kind == "f" and np.dtype(new).kind in "iu"
    return (np.abs(np.round(2 * real)) if cut and new == "uint8" else np.round(2 * real) if cut else real).astype(new)


def dtypes(call: Call) -> Iterator[tuple[str, Call]]:
    """Arrays of one dtype in each other dtype."""
    for old in dict.fromkeys(a.dtype.name for a in call.arrays()):
        for new in DTYPES:
            if new != old:
                args = _changed(call.args, lambda a, old=old, new=new: in_dtype(a, old, new))
                yield f"{old} as {new}", replace(call, args=args, grad=False)


def empty(call: Call) -> Iterator[tuple[str, Call]]:
    """Every size that dims have set to 0, and arrays one by one made 0-D."""

    def without(array: np.ndarray, size: int) -> np.ndarray:
        for dim in [d for d, n in enumerate(array.shape) if n == size]:
            array = array.take([], axis=dim)
        return array

    for size in dict.fromkeys(n for a in call.arrays() for n in a.shape if n):
        yield f"{size} as 0", replace(call, args=_changed(call.args, lambda a, size=size: without(a, size)))
    for where, leaf in places(call.args):
        if isinstance(leaf, np.ndarray) and leaf.ndim and leaf.size:
            yield f"0-D at {where}", replace(call, args=put(call.args, where, np.asarray(leaf.ravel()[0])))


def tensors(call: Call) -> Iterator[tuple[str, Call]]:
    """Numbers and lists of integers as Tensors, and as lists of Tensors."""
    whole = (call.args, call.kwargs)
    top = [*(((0, n), v) for n, v in enumerate(call.args)), *(((1, k), v) for k, v in call.kwargs.items())]
    for where, value in top:
        listed = list(value) if isinstance(value, (list, tuple)) else [value]
        if not listed or not all(type(v) is int for v in listed):
            continue
        forms: dict[str, Any] = {"int64": np.asarray(value), "int32": np.asarray(value, "int32")}
        if isinstance(value, (list, tuple)):
            forms |= {"0-D each": [np.asarray(v) for v in value], "[1] first": [np.asarray(value[:1]), *value[1:]]}
        else:
            forms["[1]"] = np.asarray([value])
        for name, form in forms.items():
            args, kwargs = put(whole, where, form)
            yield f"{where[1]} as {name}", replace(call, args=args, kwargs=kwargs, grad=False)


def names(call: Call) -> Iterator[tuple[str, Call]]:
    """All arguments by name, and each by its second names."""
    own = [name for name, _ in parameters(call.path)]
    if len(own) < len(call.args):
        return
    by_name = {**dict(zip(own, call.args, strict=False)), **call.kwargs}
    yield "by name", replace(call, args=(), kwargs=by_name, grad=False)
    for second, firsts in spelling.SECOND_NAMES.items():
        for name in set(firsts) & set(by_name) - {second}:
            if second not in by_name:
                renamed = {second if k == name else k: v for k, v in by_name.items()}
                yield f"{name} as {second}", replace(call, args=(), kwargs=renamed, grad=False)


def wrong(call: Call) -> Iterator[tuple[str, Call]]:
    """Arguments of another type, rank, size or range."""
    whole = (call.args, call.kwargs)
    top = [*(((0, n), v) for n, v in enumerate(call.args)), *(((1, k), v) for k, v in call.kwargs.items())]
    for where, value in top:
        if isinstance(value, np.ndarray):
            others = {"None": None, "text": "abc", "more dims": value[None]}
            others |= {"longer": np.concatenate([value, value[:1]])} if value.ndim else {}
        elif isinstance(value, bool):
            others = {"text": "yes", "2": 2}
        elif isinstance(value, (int, float)):
            others = {"text": "abc", "list": [value], "17": 17, "-17": -17, "fraction": value + 0.5}
        elif isinstance(value, str):
            others = {"bogus": "bogus", "3": 3}
        else:
            continue
        for name, other in others.items():
            args, kwargs = put(whole, where, other)
            yield f"{where[1]} as {name}", replace(call, args=args, kwargs=kwargs, grad=False)


SWEEPS = {sweep.__name__: sweep for sweep in (dtypes, empty, tensors, names, wrong)}


VALUES = Path(__file__).parent / "values"
WAYS = ("eager", "double", "program")


def values(only: str = "", ways: Sequence[str] = WAYS) -> list[Call]:
    """Every line of the files of values, or function with the lines below it, once a way and a choice of <<a|b>>.

    only: a pattern that what is called has, behind the name of its file.
    """
    codes = [
        (path.stem, code)
        for path in sorted(VALUES.glob("*.txt"))
        for block in re.split(r"\n(?=[^\s#])", "\n" + re.sub(r"(?m)^#.*\n", "", path.read_text()))
        if block.strip()
        for code in _choices(block.strip())
        if re.search(only, f"{path.stem}: {code}")
    ]
    return [
        Call(f"{name}.{way}", code.partition("\n")[0], (), code=code, way=way, terms=64)
        for name, code in codes
        for way in ways
    ]


def _choices(code: str) -> Iterator[str]:
    head, several, rest = code.partition("<<")
    if not several:
        yield code
        return
    choice, _, tail = rest.partition(">>")
    for one in choice.split("|"):
        yield from _choices(head + one + tail)


def calls(name: str, only: str = "", ways: Sequence[str] = WAYS) -> list[Call]:
    """The calls of a sweep that can be sent."""
    if name == "values":
        return values(only, ways)
    sendable = []
    for row in rows():
        for tag, call in SWEEPS[name](row) if only in row.path else ():
            try:
                call.message()
            except TypeError:
                continue
            sendable.append(replace(call, tag=f"{row.tag}/{tag}", row=row.id))
    return sendable


def main() -> None:
    """Print what differs, and what one side refuses, a line a call."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("sweep", choices=[*SWEEPS, "values"])
    parser.add_argument("--paddle", required=True, help="an interpreter with paddlepaddle 3.3.1")
    parser.add_argument("--only", default="", help="a part of the paths of the functions to call; of values, a pattern")
    parser.add_argument("--ways", default=",".join(WAYS), help="how values are computed")
    parser.add_argument("--refused", action="store_true", help="print what both refuse, too")
    options = parser.parse_args()
    swept, known = calls(options.sweep, options.only, options.ways.split(",")), compare.documented(drawn=True)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run.both(options.paddle, swept, Path(folder))
    kinds: Counter[str] = Counter()
    for call, (ours, theirs) in zip(swept, outcomes, strict=True):
        finding = compare.compared(call, ours, theirs)
        kinds[finding.kind] += 1
        # second derivatives that PaddlePaddle lacks are too many to read
        shown = finding.kind == compare.DIFFER or (finding.kind == compare.WIDER and call.way != "double")
        shown |= finding.kind == compare.BOTH_RAISE and options.refused
        if shown and compare.explanation(finding, known) is None:
            more = f" | {theirs['error']}" if finding.kind == compare.BOTH_RAISE else ""
            sys.stdout.write(f"{call.id} | {finding.kind} | {finding.what}{more}\n")
    sys.stdout.write(f"{dict(kinds)}\n")


if __name__ == "__main__":
    main()
