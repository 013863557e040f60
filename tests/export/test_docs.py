"""The Python of docs/deployment.md runs as it is written, and its table of options leaves none out."""

import re
from fnmatch import fnmatch
from pathlib import Path

from polyreme.inference.options import ACCEPTED

TEXT = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()


def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").symlink_to(Path(__file__).parents[1])  # files that PaddlePaddle wrote
    source = tmp_path / "docs.py"
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 4
    source.write_text("\n".join(blocks))
    exec(compile(source.read_text(), str(source), "exec"), {"__name__": "docs"})


def test_every_option_without_effect_is_listed():
    listed = [name for line in TEXT.splitlines() if "no effect" in line for name in re.findall(r"`([a-z_*]+)`", line)]
    assert [name for name in ACCEPTED if not any(fnmatch(name, pattern) for pattern in listed)] == []
