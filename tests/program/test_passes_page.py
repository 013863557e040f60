"""docs/passes.md: its snippets run, in order, as one program; its table names every pass and option.

The doctest of program.passes.table is true too.
"""

import doctest
import re
from pathlib import Path

import polyreme as paddle
from polyreme.core import unique_name
from polyreme.program.passes import table
from polyreme.static import passes

PAGE = (Path(__file__).parents[2] / "docs" / "passes.md").read_text()


def test_snippets_run():
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.S))
    assert len(code.splitlines()) > 30
    with unique_name.guard():
        try:
            exec(compile(code, "passes.md", "exec"), {})
        finally:
            paddle.disable_static()


def test_the_table_is_whole():
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| *(.*?) *\|$", PAGE, re.M))
    assert {name: tuple(re.findall(r"`(\w+)`", options)) for name, options in rows.items()} == {
        p.name: p.options for p in passes.PASSES.values()
    }
    assert {p.name for p in passes.PATTERNS} <= set(re.findall(r"`(\w+)`", PAGE))
    assert table.PASSES is passes.PASSES


def test_the_example_is_true():
    result = doctest.testmod(table)
    assert (result.attempted, result.failed) == (1, 0)
