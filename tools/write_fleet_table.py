"""Writes the table of strategy settings into docs/fleet.md, between its two marks.

Run it after changing polyreme/distributed/fleet/base/strategy_fields.py: `python tools/write_fleet_table.py`.
tests/distributed/fleet/test_strategy.py fails when it is out of date.
"""

from pathlib import Path

from polyreme.distributed.fleet.base.strategy_fields import HARMLESS, HONOURED, OWN, REFUSED, walk

PAGE = Path(__file__).parent.parent / "docs" / "fleet.md"
START, END = "<!-- settings -->", "<!-- end of settings -->"
TITLES = {
    HONOURED: ("Honoured", "what it becomes"),
    HARMLESS: ("Harmless: the result is the same either way", "why"),
    REFUSED: ("Refused: any value but the default is an error", "instead"),
}


def table() -> str:
    """Three tables, one for each class; settings of one group with one note share a line."""
    return "\n".join(part for kind in TITLES for part in _part(kind))


def _part(kind: str) -> list[str]:
    lines: dict[tuple[str, str], list[str]] = {}
    for name, field in walk():
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
    text = PAGE.read_text()
    before, after = text.split(START)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{START}\n{table()}\n{END}{after}")
