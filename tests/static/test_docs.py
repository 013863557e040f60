"""The Python of docs/static.md runs as it is written; the links of the page lead somewhere."""

import doctest
import re
from pathlib import Path

import polyreme as paddle
from polyreme import static
from polyreme.core import unique_name
from polyreme.static import places

PAGE = Path(__file__).parents[2] / "docs" / "static.md"


def test_the_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 6
    try:
        with unique_name.guard(), static.scope_guard(static.Scope()):
            exec(compile("\n".join(blocks), str(PAGE), "exec"), {"__name__": "docs"})
    finally:
        paddle.disable_static()


def test_the_doctest_runs():
    result = doctest.testmod(places)
    assert (result.attempted, result.failed) == (1, 0)


def test_names_and_links_are_there():
    text = PAGE.read_text()
    for link in re.findall(r"\]\((\w+\.md)\)", text):
        assert (PAGE.parent / link).exists(), link
    assert all(hasattr(m, "LEFT_OUT") for m in (static, static.nn, static.amp))
