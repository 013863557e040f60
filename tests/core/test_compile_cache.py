"""The folder of compiled programs stays below its bytes and keeps what was used last."""

import os
import subprocess
import sys

import jax
import pytest

from polyreme import flags
from polyreme.core.engine.compile_cache import ProgramFolder
from polyreme.errors import ConfigError


def filled(folder, sizes):
    """Programs p0, p1, ... of these bytes, each used a second after the one before."""
    for i, nbytes in enumerate(sizes):
        path = folder / f"p{i}-cache"
        path.write_bytes(bytes(nbytes))
        os.utime(path, (1000 + i, 1000))
    return ProgramFolder(folder, max_bytes=100)


def names(folder):
    return sorted(p.name.removesuffix("-cache") for p in folder.iterdir() if p.name != "last-look")


@pytest.mark.parametrize(
    ("sizes", "left"),
    [
        ([50, 50], ["p0", "p1"]),
        ([50, 50, 1], ["p1", "p2"]),
        # 102 bytes: down to 90, which one file of 10 does not reach
        ([10, 10, 82], ["p2"]),
        ([300], []),
        ([], []),
    ],
)
def test_what_was_used_longest_ago_is_deleted(tmp_path, sizes, left):
    filled(tmp_path, sizes).trim()
    assert names(tmp_path) == left


def test_reading_counts_as_use_and_other_files_stay(tmp_path):
    folder = filled(tmp_path, [60, 60])
    (tmp_path / "notes").write_bytes(bytes(500))
    os.utime(tmp_path / "p0-cache", (5000, 1000))
    folder.trim()
    assert names(tmp_path) == ["notes", "p0"]


def test_a_folder_or_file_that_is_gone_is_no_error(tmp_path, monkeypatch):
    ProgramFolder(tmp_path / "gone", 1).trim()
    folder, unlink = filled(tmp_path, [60, 60]), os.unlink
    # another process deletes each file first
    monkeypatch.setattr(os, "unlink", lambda path: (unlink(path), unlink(path)))
    folder.trim()
    assert names(tmp_path) == []


def test_trimmed_after_so_many_programs(tmp_path, monkeypatch):
    folder, listeners, ends = filled(tmp_path, [60, 60]), [], []
    monkeypatch.setattr(jax.monitoring, "register_event_listener", listeners.append)
    monkeypatch.setattr("atexit.register", ends.append)
    folder.keep_trimmed()
    (count,), (end,) = listeners, ends
    count("/jax/compilation_cache/cache_hits")
    end()
    assert names(tmp_path) == ["p0", "p1"]  # who writes nothing does not look
    for _ in range(255):
        count("/jax/compilation_cache/cache_misses")
    assert names(tmp_path) == ["p0", "p1"]
    count("/jax/compilation_cache/cache_misses")
    assert names(tmp_path) == ["p1"]


def test_at_its_end_a_process_that_wrote_trims_unless_another_has_just_looked(tmp_path, monkeypatch):
    folder, listeners, ends = filled(tmp_path, [60, 60]), [], []
    monkeypatch.setattr(jax.monitoring, "register_event_listener", listeners.append)
    monkeypatch.setattr("atexit.register", ends.append)
    folder.keep_trimmed()
    listeners[0]("/jax/compilation_cache/cache_misses")
    look = tmp_path / "last-look"
    look.touch()
    ends[0]()
    assert names(tmp_path) == ["p0", "p1"]
    os.utime(look, (1000, 1000))
    ends[0]()
    assert names(tmp_path) == ["p1"]
    look.unlink()
    filled(tmp_path, [60, 60])
    ends[0]()
    assert names(tmp_path) == ["p1"]


def test_bytes_of_the_environment(monkeypatch):
    monkeypatch.delenv("POLYREME_COMPILE_CACHE_BYTES", raising=False)
    assert flags.compile_cache_bytes() == 1 << 30
    monkeypatch.setenv("POLYREME_COMPILE_CACHE_BYTES", "5000")
    assert flags.compile_cache_bytes() == 5000
    monkeypatch.setenv("POLYREME_COMPILE_CACHE_BYTES", "0")
    with pytest.raises(ConfigError, match="POLYREME_COMPILE_CACHE_BYTES"):
        flags.compile_cache_bytes()


DAMAGED = """
import sys
from pathlib import Path

import polyreme as paddle
from polyreme.core.engine import program_bound

def compute():
    print(paddle.nn.functional.softmax(paddle.to_tensor([1.0, 2.0])).tolist())

compute()
programs = [path for path in Path(sys.argv[1]).rglob("*") if path.is_file() and path.stat().st_size > 1000]
assert programs
for at, path in enumerate(programs):
    path.write_bytes([b"", b"\\0garbage" * 99][at % 2])
program_bound.bound.clear()
compute()
"""


def test_damaged_programs_are_compiled_again(tmp_path):
    settings = {"POLYREME_COMPILE_CACHE": str(tmp_path), "POLYREME_COMPILE_CACHE_SECONDS": "0.0001"}
    run = subprocess.run(
        [sys.executable, "-c", DAMAGED, tmp_path],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    whole, again = run.stdout.splitlines()
    assert again == whole
    assert "Error reading persistent compilation cache entry" in run.stderr
