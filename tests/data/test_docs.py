"""The Python of docs/data.md runs as it is written, as one program."""

import doctest
import re
from pathlib import Path

from polyreme.data import token_pair

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")


def test_every_python_block_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "docs/data.md", "exec"), names)
    assert names["written"]


def test_doctests_are_true():
    for module in (token_pair,):
        result = doctest.testmod(module)
        assert result.failed == 0
        assert result.attempted > 0
