"""The examples of docs/branches.md run."""

import re
from pathlib import Path

import pytest


@pytest.mark.slow
def test_branches():
    text = (Path(__file__).parents[2] / "docs" / "branches.md").read_text()
    names = {}
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(example, "docs/branches.md", "exec"), names)
