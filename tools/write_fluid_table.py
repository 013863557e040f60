"""Writes into docs/fluid.md, between its two marks, which names of 1.7's fluid there are, and what to use instead.

Run it after a name came or went: `python tools/write_fluid_table.py`. tests/fluid/test_names.py fails when it is out
of date. The names are in tools/fluid_names.txt.
"""

import importlib
import re
from pathlib import Path
from typing import Any

from polyreme.fluid.absent import INSTEAD
from polyreme.stand_ins import Absent

NAMES = Path(__file__).parent / "fluid_names.txt"
PAGE = Path(__file__).parent.parent / "docs" / "fluid.md"
START, END = "<!-- names -->", "<!-- end of names -->"


def names() -> dict[str, dict[str, list[str] | None]]:
    """Module -> name -> its parameters, None where they are not written down."""
    by_module: dict[str, dict[str, list[str] | None]] = {}
    module: dict[str, list[str] | None] = {}
    for line in NAMES.read_text().splitlines():
        entry = re.fullmatch(r"  (\w+)(?:\((.*)\))?", line)
        if entry:
            given = entry[2]
            module[entry[1]] = None if given is None else [p for p in given.split(", ") if p]
        elif line and not line.startswith("#"):
            module = by_module[line] = {}
    return by_module


def _module(path: str) -> Any:
    """polyreme's module of this name; None if there is none."""
    owner, _, last = path.rpartition(".")
    if not owner:
        return importlib.import_module("polyreme.fluid")
    try:
        return getattr(_module(owner), last)
    except AttributeError:
        return None


def found(module: str, name: str) -> Any:
    """What polyreme has under a name; None if it has nothing, or a stand-in that says so."""
    value = getattr(_module(module), name, None)
    return None if isinstance(value, Absent) else value


def instead(module: str, name: str) -> str:
    """What the error of an absent name says to use, or of its absent module."""
    what = name if _module(module) is not None else module.rpartition(".")[2]
    return INSTEAD.get(what, "write it with polyreme's ops")


def table() -> str:
    """For each module a list of what there is, and a table of what there is not, equal reasons in one line."""
    parts: list[str] = []
    for module, entries in names().items():
        there = [n for n in entries if found(module, n) is not None]
        reasons: dict[str, list[str]] = {}
        for name in entries:
            if name not in there:
                reasons.setdefault(instead(module, name), []).append(f"`{name}`")
        parts += [f"### {module}: {len(there)} of {len(entries)}", ""]
        parts += [", ".join(f"`{n}`" for n in there), ""] if there else []
        if reasons:
            rows = [f"| {', '.join(absent)} | {reason} |" for reason, absent in reasons.items()]
            parts += ["| absent | instead |", "|---|---|", *rows, ""]
    return "\n".join(parts)


def main() -> None:
    """Write the page."""
    head, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(f"{head}{START}\n\n{table()}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
