"""The Python of docs/evaluation.md runs as it is written."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/evaluation.md").read_text(encoding="utf-8")


def test_every_python_block_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "docs/evaluation.md", "exec"), names)
    assert names["row"]["task"] == "choice"
