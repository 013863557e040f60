"""`polyreme profile`: what it prints and leaves, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = """
model: {family: gpt, vocab_size: 64, hidden_size: 16, num_layers: 1, num_heads: 2, seq_len: 8}
data: {synthetic_tokens: 2000}
train: {global_batch: 8}
plan: {dp: 2}
device: cpu
"""


def profile(folder, *arguments):
    (folder / "small.yaml").write_text(SMALL)
    # without CPU_NUM the command makes as many devices as the plan has
    environment = {k: v for k, v in os.environ.items() if k != "CPU_NUM"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "polyreme.cli.main", "profile", "small.yaml", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env=environment,
        check=False,
    )


@pytest.mark.slow
def test_tables_and_files(tmp_path):
    done = profile(tmp_path, "--steps", "1", "--output", "seen/here")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("1 steps of ")
    assert lines[-1] == "written: seen/here"
    assert max(map(len, lines)) <= 100
    assert lines[lines.index("to change, and what that gains of a step at most") + 1].startswith("1. ")
    (total,) = [line.split() for line in lines if line.startswith("sum ")]
    assert total[2] == "100.0%"
    names = {path.name for path in (tmp_path / "seen" / "here").iterdir()}
    assert {"trace.json.gz", "summary.json", "summary.txt"} <= names
    written = json.loads((tmp_path / "seen" / "here" / "summary.json").read_text())
    assert {tuple(row["axes"]) for row in written["collectives"]} == {("dp",)}
    # the run itself leaves nothing
    assert not list(tmp_path.glob("runs/*/checkpoints"))


@pytest.mark.slow
def test_offloaded_parameters_are_refused(tmp_path):
    done = profile(tmp_path, "plan.dp=1", "plan.offload={param: host}")
    assert done.returncode == 2
    assert "leave it out" in done.stderr
