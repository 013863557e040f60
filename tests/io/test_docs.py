"""The Python of docs/data_loading.md runs as it is written, and learns its pictures."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/data_loading.md").read_text(encoding="utf-8")


def test_pictures_in_a_folder_for_each_class_are_learnt(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {"__name__": "page"}
    exec(compile(code, "docs/data_loading.md", "exec"), names)
    assert names["train"].classes == ["blue", "green", "red"]
    assert names["result"]["acc"] > 0.9
    assert capsys.readouterr().out.splitlines()[-1].startswith("['blue'")
    assert Path("colours.pdparams").exists()
