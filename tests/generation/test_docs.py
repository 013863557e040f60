"""The Python of docs/generation.md runs as it is written, as one program."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/generation.md").read_text(encoding="utf-8")


def test_the_examples_run(capsys):
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    exec(compile(code, "docs/generation.md", "exec"), {"__name__": "generation"})
    assert capsys.readouterr().out.splitlines()[0].endswith("length")
