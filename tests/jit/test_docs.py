"""docs/capture.md: its snippets run, in order, as one program; the doctests of polyreme.jit are true."""

import doctest
import re
from pathlib import Path

import pytest

from polyreme.jit import control_flow

PAGE = Path(__file__).parents[2] / "docs" / "capture.md"


def test_snippets_run(tmp_path, monkeypatch):
    text = PAGE.read_text()
    lines: list[str] = [""] * text.count("\n")
    for found in re.finditer(r"```python\n(.*?)```", text, re.S):
        start = text.count("\n", 0, found.start(1))
        block = found.group(1).splitlines()
        lines[start : start + len(block)] = block
    # a file, since capture reads a function's source; lines are the page's
    script = tmp_path / "capture_page.py"
    script.write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    assert sum(bool(line) for line in lines) > 50
    __import__("capture_page")


@pytest.mark.parametrize("module", [control_flow], ids=lambda m: m.__name__)
def test_examples_of_docstrings_hold(module):
    result = doctest.testmod(module)
    assert result.attempted > 4
    assert result.failed == 0
