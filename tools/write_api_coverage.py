"""Writes docs/api_coverage.md: which public names of PaddlePaddle 3.3.1 there are, and where parameters differ.

Run it after a name came or went: `python tools/write_api_coverage.py`. tests/test_api_coverage.py fails when the page
is out of date, or when a name or a difference has no reason. The names are in tools/api_reference.txt, the reasons in
tools/api_reasons.txt.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from polyreme.core import spelling

HERE = Path(__file__).parent
NAMES = HERE / "api_reference.txt"
REASONS = HERE / "api_reasons.txt"
PAGE = HERE.parent / "docs" / "api_coverage.md"
# every op takes these; a Layer's and an optimizer's `name` is for PaddlePaddle's listings
EVERYWHERE = {"name", "out", "args", "kwargs", "self"}
KINDS = ("missing", "out of scope", "differs")
HEAD = """# API coverage

Written by `python tools/write_api_coverage.py`. What PaddlePaddle 3.3.1 makes public, and what of it polyreme has;
below each table of absent names, the names whose parameters differ. `missing` may come; `out of scope` will not.

"""


@cache
def names() -> dict[str, dict[str, str | None]]:
    """Module -> name -> its parameters as text; None where it is no function or they are not written down."""
    by_module: dict[str, dict[str, str | None]] = {}
    module: dict[str, str | None] = {}
    for line in NAMES.read_text().splitlines():
        entry = re.fullmatch(r"  (\w+)(?:\((.*)\))?", line)
        if entry:
            module[entry[1]] = entry[2]
        elif line and not line.startswith("#"):
            module = by_module[line] = {}
    return by_module


def reasons() -> dict[str, tuple[str, str]]:
    """Pattern of a full name -> (one of KINDS, why)."""
    by_pattern, kind, why = {}, "", ""
    for line in REASONS.read_text().splitlines():
        if line.startswith("#") or not line:
            continue
        if line.startswith("  "):
            for pattern in line.split():
                by_pattern[pattern] = (kind, why)
        else:
            kind, _, why = line.partition(": ")
            if kind not in KINDS:
                raise ValueError(f"{REASONS.name}: {line!r} starts with none of {', '.join(KINDS)}")
    return by_pattern


def reason(name: str, kinds: tuple[str, ...]) -> tuple[str, str] | None:
    """The first reason of those kinds whose pattern fits a full name."""
    fits = (r for p, r in reasons().items() if r[0] in kinds and fnmatchcase(name, p))
    return next(fits, None)


def found(module: str, name: str) -> Any:
    """What polyreme has under a name; None if it has nothing."""
    owner: Any = importlib.import_module("polyreme")
    for part in module.split(".")[1:]:
        owner = _part(owner, part)
    if owner is None:
        return None
    there = _part(owner, name)
    return there if there is not None or not hasattr(owner, name) else there_but_none


there_but_none = object()
"""Stands for a name that is there and whose value is None, such as newaxis."""


def _part(owner: Any, name: str) -> Any:
    if owner is None:
        return None
    if not hasattr(owner, name) and inspect.ismodule(owner):
        try:
            return importlib.import_module(f"{owner.__name__}.{name}")
        except ModuleNotFoundError:
            return None
    return getattr(owner, name, None)


def differences(module: str, name: str, parameters: str | None) -> list[str]:
    """Parameters of PaddlePaddle that polyreme's function lacks or has at another place."""
    if parameters is None or "<" in parameters:
        return []
    theirs = [a.arg for a in ast.parse(f"def f({parameters}): pass").body[0].args.args]  # type: ignore[attr-defined]
    there = found(module, name)
    ours = _signature(there)
    kinds = {p.kind for p in ours.parameters.values()} if ours else set()
    if ours is None or {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL} <= kinds:
        return []
    our_names = [n for n, p in ours.parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    our_names, theirs = [[n for n in ns if n not in EVERYWHERE] for ns in (our_names, theirs)]
    if module == "paddle.Tensor":
        our_names, theirs = (
            our_names[1:] if our_names[:1] in (["x"], ["input"], ["condition"]) else our_names,
            theirs[1:],
        )
    taken, layer = set(ours.parameters), there
    while layer is not None:  # a check put before a function takes what the function takes
        taken |= set(getattr(layer, "__kwdefaults__", None) or ())
        layer = getattr(layer, "__wrapped__", None)
    lacking = [n for n in theirs if n not in taken and spelling.parameter(n, taken) is None]
    said = [f"no `{n}`" for n in lacking if inspect.Parameter.VAR_KEYWORD not in kinds]
    common = [n for n in theirs if n in our_names]
    moved = inspect.Parameter.VAR_POSITIONAL not in kinds and [n for n in our_names if n in common] != common
    return [*said, *(["another order"] if moved else [])]


def _signature(there: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(there)
    except (TypeError, ValueError):
        return None


def absent() -> Iterator[tuple[str, str]]:
    """(module, name) of all that polyreme does not have."""
    for module, entries in names().items():
        yield from ((module, name) for name in entries if found(module, name) is None)


def differing() -> Iterator[tuple[str, str, list[str]]]:
    """(module, name, what differs) of all whose parameters differ."""
    for module, entries in names().items():
        for name, parameters in entries.items():
            if found(module, name) is not None and (what := differences(module, name, parameters)):
                yield module, name, what


def page() -> str:
    """The text of docs/api_coverage.md."""
    gone: dict[str, list[str]] = {}
    for module, name in absent():
        gone.setdefault(module, []).append(name)
    other: dict[str, list[tuple[str, list[str]]]] = {}
    for module, name, what in differing():
        other.setdefault(module, []).append((name, what))
    total, lacking = sum(map(len, names().values())), sum(map(len, gone.values()))
    lines = [
        f"{total - lacking} of {total} names.",
        "",
        "| namespace | present | missing | out of scope |",
        "|---|---|---|---|",
    ]
    parts = []
    for module, entries in names().items():
        why = {n: reason(f"{module}.{n}", KINDS[:2]) or ("missing", "no reason given") for n in gone.get(module, [])}
        count = [sum(kind == k for k, _ in why.values()) for kind in KINDS[:2]]
        lines.append(
            f"| `{module}` | {len(entries) - len(why)} of {len(entries)} | {count[0] or ''} | {count[1] or ''} |"
        )
        parts += _section(module, why, other.get(module, []))
    return HEAD + "\n".join([*lines, "", *parts])


def _section(module: str, why: dict[str, tuple[str, str]], other: list[tuple[str, list[str]]]) -> list[str]:
    if not why and not other:
        return []
    alike: dict[tuple[str, str], list[str]] = {}
    for name, explanation in why.items():
        alike.setdefault(explanation, []).append(f"`{name}`")
    lines = [f"## {module}", ""]
    if alike:
        rows = [f"| {', '.join(ns)} | {kind} | {because} |" for (kind, because), ns in alike.items()]
        lines += ["| absent | | why |", "|---|---|---|", *rows, ""]
    if other:
        rows = []
        for name, what in other:
            explanation = reason(f"{module}.{name}", KINDS[2:]) or ("", "no reason given")
            rows.append(f"| `{name}` | {', '.join(what)} | {explanation[1]} |")
        lines += ["| parameters differ | how | why |", "|---|---|---|", *rows, ""]
    return lines


if __name__ == "__main__":
    PAGE.write_text(page())
