"""Killed while threads read, write and link optimizer state on disk; continued from a checkpoint with the same bits."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from polyreme.distributed.checkpoint.store import CheckpointStore
from polyreme.optimizer import on_disk
from tests.optimizer import disk_run


@pytest.fixture(autouse=True)
def _buckets_as_before(monkeypatch):
    monkeypatch.setattr(on_disk, "BUCKET_BYTES", on_disk.BUCKET_BYTES)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run that nobody killed ends with."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_disk, "BUCKET_BYTES", on_disk.BUCKET_BYTES)
        disk_run.train(folder)
    return saved(folder)


def saved(folder, step=None):
    with CheckpointStore(folder / "saved", read_only=True) as store:
        return store.restore(None, step)


# a step reads and writes 4 files of 2 arrays each, and a checkpoint, every second step, links to all
@pytest.mark.slow_cases("read", "write", "link", "digest", "commit", "first")
@pytest.mark.parametrize(
    ("fault", "left"),
    [
        pytest.param("offload.read:kill@16", 2, id="read"),
        pytest.param("offload.write:kill@14", 2, id="write"),
        pytest.param("offload.array:kill@30", 2, id="half_a_file"),
        pytest.param("offload.link:kill@6", 2, id="link"),
        pytest.param("ckpt.write:kill@11", 2, id="digest"),
        pytest.param("ckpt.rename:kill@2", 2, id="commit"),
        pytest.param("offload.array:kill@9", None, id="first"),
    ],
)
def test_killed_and_continued_equals_never_killed(fault, left, whole, tmp_path):
    command = [sys.executable, "-m", "tests.optimizer.disk_run", str(tmp_path)]
    killed = subprocess.run(command, env=os.environ | {"FAULTS": fault}, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    if left is not None:
        assert saved(tmp_path)[1]["step"] == left
    disk_run.train(tmp_path)
    (arrays, meta), (expected, expected_meta) = saved(tmp_path), whole
    assert meta == expected_meta
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    folders = os.listdir(tmp_path / "ssd")
    assert all(f"-{os.getpid()}-" in entry for entry in folders)  # those of the killed process are gone
