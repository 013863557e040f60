"""What comes with polyreme is copied, never over what is there, and each configuration among it is read."""

import pytest

from polyreme.cli.main import main
from polyreme.errors import ConfigError
from polyreme.recipes import shipped


def test_examples_are_copied_and_never_over_what_is_there(tmp_path, capsys, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "gpt_kjv.yaml").write_text("mine")
    assert main(["examples", str(tmp_path)]) == 0
    assert (tmp_path / "configs" / "gpt_kjv.yaml").read_text() == "mine"
    assert (tmp_path / "data" / "kjv.txt.gz").stat().st_size > 10**6
    printed = capsys.readouterr().out
    assert str(tmp_path / "configs" / "suite_pretrain.yaml") in printed
    assert shipped.copy_examples(tmp_path) == []
    monkeypatch.chdir(tmp_path)  # where its relative paths lead to the copies
    assert main(["pretrain", "configs/suite_pretrain.yaml", "--dry-run"]) == 0
    assert "data/kjv.txt.gz" in capsys.readouterr().out


def test_a_package_without_them_and_a_folder_that_cannot_be(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written: .*; name another folder"):
        shipped.copy_examples(tmp_path / "file")
    monkeypatch.setattr(shipped, "shipped_folder", lambda: tmp_path)
    with pytest.raises(ConfigError, match="has no configs and data; install the wheel anew, or use a checkout"):
        shipped.copy_examples(tmp_path)
