"""Writes the tables of strategy settings into docs/fleet.md and docs/auto_parallel.md, between their two marks.

Run it after changing a strategy_fields.py (distributed/fleet/base, distributed/auto_parallel):
`python tools/write_fleet_table.py`. The test_strategy.py of each fails when its page is out of date.
"""

from pathlib import Path

from polyreme.distributed.auto_parallel.engine import strategy_fields as auto
from polyreme.distributed.fleet.base.strategy_fields import FIELDS, OWN
from polyreme.distributed.settings import HARMLESS, HONOURED, REFUSED, Table, walk

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {"fleet.md": FIELDS, "auto_parallel.md": auto.FIELDS}
START, END = "<!-- settings -->", "<!-- end of settings -->"
TITLES = {
    HONOURED: ("Honoured", "what it becomes"),
    HARMLESS: ("Harmless: the result is the same either way", "why"),
    REFUSED: ("Refused: any value but the default is an error", "instead"),
}


def table(fields: Table = FIELDS) -> str:
    """Three tables, one for each class; settings of one group with one note share a line."""
    return "\n".join(part for kind in TITLES for part in _part(fields, kind))


def _part(fields: Table, kind: str) -> list[str]:
    lines: dict[tuple[str, str], list[str]] = {}
    for name, field in walk(fields):
        if field.kind == kind:
            group, _, last = name.rpartition(".")
            group = "every group of NCCL settings" if group.endswith("nccl_config") else group
            own = " (own)" if name in OWN else ""
            named = lines.setdefault((group, field.note), [])
            named += [] if f"`{last}`{own}" in named else [f"`{last}`{own}"]
    title, column = TITLES[kind]
    rows = [f"| {_shown(group)}{', '.join(names)} | {note} |" for (group, note), names in lines.items()]
    return [f"### {title}", "", f"| setting | {column} |", "|---|---|", *rows, ""]


def _shown(group: str) -> str:
    return f"{group}: " if " " in group else f"`{group}`: " if group else ""


if __name__ == "__main__":
    for name, fields in PAGES.items():
        text = (DOCS / name).read_text()
        before, after = text.split(START)[0], text.split(END)[1]
        (DOCS / name).write_text(f"{before}{START}\n{table(fields)}\n{END}{after}")
