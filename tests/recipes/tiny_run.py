"""A run small enough for tests: its configuration, running it here or in a process of its own, and what it left."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np

from polyreme.distributed.checkpoint import CheckpointStore
from polyreme.recipes import config_file
from polyreme.recipes.training import run
from polyreme.recipes.training.logs import read_jsonl

CONFIG = """
model: {family: gpt, vocab_size: 512, hidden_size: 32, num_layers: 1, num_heads: 4, seq_len: 16, dropout: 0.1}
data: {text: synthetic, synthetic_tokens: 20000}
train: {steps: 20, global_batch: 8, learning_rate: 1e-3, warmup_steps: 4}
plan: {dp: 2, sharding: 2, mp: 2, sharding_stage: 3}
log: {interval: 1, validation_interval: 0, sample_tokens: 0, plot: false, tensorboard: false}
checkpoint: {interval: 5, keep: 3}
device: cpu
"""
ONE_DEVICE = ["plan.dp=1", "plan.sharding=1", "plan.mp=1", "plan.sharding_stage=0"]


def load(output, *overrides):
    """The tiny configuration, read as the command line reads it."""
    output.mkdir(parents=True, exist_ok=True)
    path = output.parent / f"{output.name}.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return config_file.load(path, [*overrides, f"output={json.dumps(str(output))}"])


def train(output, *overrides, resume="auto"):
    """Run it in this process."""
    loaded = load(output, *overrides)
    source = {"folder": loaded.folder, "resume_command": ["polyreme"]}
    run.run(loaded.config, resume=resume, overrides_source=source)


def start(output, *overrides, arguments=(), **environment):
    """Start it in a process of its own, its standard output and error piped."""
    loaded = load(output, *overrides)
    words = [str(loaded.path), *loaded.overrides, *arguments]
    return start_command(["polyreme", "pretrain", *words], **environment)


def start_command(words, **environment):
    """Start a `polyreme ...` command."""
    assert words[0] == "polyreme"
    return subprocess.Popen(
        [sys.executable, "-m", "polyreme.cli.main", *words[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"CPU_NUM": "8"} | environment,
    )


def resume_command(stderr):
    """The command line that a stopped run prints."""
    return shlex.split(stderr.split("Resume with:")[1].strip().splitlines()[0])


def finish(process, code=0):
    """Wait for the end; returns (stdout, stderr)."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    return out, err


def history(output):
    """What must not depend on interruptions: [(step, loss, rate, gradient norm), ...] of metrics.jsonl."""
    rows = [r for r in read_jsonl(Path(output) / "metrics.jsonl") if r["kind"] == "train"]
    return [(r["step"], r["loss"], r["learning_rate"], r["grad_norm"]) for r in rows]


def saved(output, step=None):
    """(arrays, meta) of a checkpoint, the newest by default."""
    with CheckpointStore(Path(output) / "checkpoints", read_only=True) as store:
        return store.restore(step=step)


def assert_same_state(one, other):
    """Parameters, optimizer state and random key equal bit for bit, and the position in the data."""
    (a, meta_a), (b, meta_b) = saved(one), saved(other)
    assert a.keys() == b.keys()
    assert {"rng", "model/tokens.weight"} <= a.keys()
    assert any(name.startswith("optimizer/") for name in a)
    for name in a:
        np.testing.assert_array_equal(a[name].view(np.uint8), b[name].view(np.uint8), err_msg=name)
    assert meta_a["data"] == meta_b["data"]
    assert meta_a["step"] == meta_b["step"]
