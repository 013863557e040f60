"""The table of docs/passes.md names every pass and option."""

import re
from pathlib import Path

from polyreme.program.passes import table
from polyreme.static import passes

PAGE = (Path(__file__).parents[2] / "docs" / "passes.md").read_text()


def test_the_table_is_whole():
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| *(.*?) *\|$", PAGE, re.M))
    assert {name: tuple(re.findall(r"`(\w+)`", options)) for name, options in rows.items()} == {
        p.name: p.options for p in passes.PASSES.values()
    }
    assert {p.name for p in passes.PATTERNS} <= set(re.findall(r"`(\w+)`", PAGE))
    assert table.PASSES is passes.PASSES
