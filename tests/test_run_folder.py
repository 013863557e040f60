"""The run's folder: deleted with the run, or by the next one if the run was killed, and never while it is in use."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.run_folder import PREFIX, RunFolder

CLAIM = """
import sys, time
from pathlib import Path
from tests.run_folder import RunFolder

print(RunFolder(Path(sys.argv[1])).path, flush=True)
time.sleep(60)
"""


def test_a_killed_runs_folder_is_deleted_by_the_next_and_no_other(tmp_path):
    root = Path(__file__).parents[1]
    command = [sys.executable, "-c", CLAIM, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        left = Path(process.stdout.readline().strip())
        try:
            (left / "program").write_text("compiled")
            first = RunFolder(tmp_path)
            assert left.is_dir()
            assert first.path != left
        finally:
            process.send_signal(signal.SIGKILL)
    old, fresh, other = (tmp_path / name for name in (f"{PREFIX}old", f"{PREFIX}fresh", "other"))
    for folder in (old, fresh, other):
        folder.mkdir()
    os.utime(old, (0, 0))  # made without a lock, long ago
    second = RunFolder(tmp_path)
    assert set(tmp_path.iterdir()) == {first.path, second.path, fresh, other}
    first.delete()
    second.delete()
    assert set(tmp_path.iterdir()) == {fresh, other}
