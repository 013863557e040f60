"""One run in one folder, refused before any work where that cannot be."""

import subprocess
import sys

import pytest

from polyreme.errors import ConfigError
from polyreme.recipes.training.output_folder import claim

HOLD = (
    "import sys, pathlib; from polyreme.recipes.training.output_folder import claim\n"
    "with claim(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
)


def hold(folder):
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_second_run_names_the_first(tmp_path):
    first = hold(tmp_path / "run")
    try:
        with pytest.raises(ConfigError, match=f"is being written by process {first.pid}"), claim(tmp_path / "run"):
            pass
    finally:
        first.communicate(timeout=10)
    with claim(tmp_path / "run") as folder:
        assert folder == tmp_path / "run"


def test_a_new_folder_stays_if_something_is_in_it(tmp_path):
    with pytest.raises(ConfigError, match="data"), claim(tmp_path / "run"):
        raise ConfigError("data")
    with pytest.raises(ConfigError, match="data"), claim(tmp_path / "above" / "run"):
        raise ConfigError("data")
    assert not any(tmp_path.iterdir())
    with claim(tmp_path / "run") as folder:
        (folder / "metrics.jsonl").touch()
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    (tmp_path / "old").mkdir()
    with claim(tmp_path / "old"):
        pass
    assert (tmp_path / "old").exists()


def test_killed_run_leaves_no_lock(tmp_path):
    first = hold(tmp_path / "run")
    first.kill()
    first.communicate(timeout=10)
    with claim(tmp_path / "run"):
        pass


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "run").write_text("a file in the way")
    with (
        pytest.raises(ConfigError, match=r"run is a file; a folder is needed there"),
        claim(tmp_path / "run"),
    ):
        pass
    with pytest.raises(ConfigError, match="cannot be written"), claim(tmp_path / "run" / "below"):
        pass
