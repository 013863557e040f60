"""`polyreme comm`: the tables and the JSON of a small configuration, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = """
model: {family: gpt, vocab_size: 64, hidden_size: 16, num_layers: 1, num_heads: 2, seq_len: 8}
train: {global_batch: 8}
plan: {dp: 2, mp: 2}
device: cpu
"""


def comm(folder, *arguments):
    (folder / "small.yaml").write_text(SMALL)
    # without CPU_NUM the command makes as many devices as the plan has
    environment = {k: v for k, v in os.environ.items() if k != "CPU_NUM"}
    return subprocess.run(
        [sys.executable, "-m", "polyreme.cli.main", "comm", str(folder / "small.yaml"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=environment,
        check=False,
    )


@pytest.mark.slow
def test_as_tables_and_as_json(tmp_path):
    tables = comm(tmp_path)
    assert tables.returncode == 0, tables.stderr
    assert "GPT.blocks.0.ffn.down" in tables.stdout
    whole = next(line.split() for line in tables.stdout.splitlines() if line.startswith("all  "))
    found = json.loads(comm(tmp_path, "--json", "train.accumulation=2").stdout)
    assert found["totals"][-1]["ratio"] == 1.0
    assert whole[-3] == "1.000"
    assert {c["kind"] for c in found["collectives"]} == {"all-reduce"}


@pytest.mark.slow
def test_a_pipeline_lists_each_stage_and_what_it_sends(tmp_path):
    tables = comm(tmp_path, "plan.pp=2", "plan.dp=1", "model.num_layers=2", "train.accumulation=2")
    assert tables.returncode == 0, tables.stderr
    lines = [line.split() for line in tables.stdout.splitlines() if line]
    assert any(line[:2] == ["send", "pp"] for line in lines)
    (mean,) = [line for line in lines if line[0] == "mean"]
    assert mean[-3] == "1.000"
