"""`polyreme profile`: the account of recorded steps beside the programs, the schedule and the formulas."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

from polyreme import nn
from polyreme.distributed.comm_report import find_collectives
from polyreme.errors import ConfigError
from polyreme.profiler import load_profiler_result
from polyreme.profiler.trace import TraceEvent, read_chrome, write_within
from polyreme.recipes import config_file
from polyreme.recipes.profiling import drawing as profile_drawing
from polyreme.recipes.profiling import report as profile_report
from polyreme.recipes.profiling import run as profiling
from polyreme.recipes.profiling.step_profile import PARTS, planned_tasks
from polyreme.recipes.training.traces import TRACE

CONFIG = """
model: {family: gpt, vocab_size: 64, hidden_size: 32, num_layers: 2, num_heads: 2, seq_len: 16}
data: {synthetic_tokens: 4000}
train: {global_batch: 8}
device: cpu
"""
STEPS = 2


def record(folder, *overrides):
    path = folder / "run.yaml"
    path.write_text(CONFIG)
    loaded = config_file.load(path, [*overrides, f"output={folder / 'run'}"])
    recording = profiling.record(loaded.config, folder, STEPS, jax.devices()[: loaded.config.plan.num_devices])
    profile_report.write(recording, folder / "profile")
    return recording, json.loads((folder / "profile" / profile_report.SUMMARY).read_text())


def check_sums(recording, written):
    """Every device's parts are the step, and the operators' times what it computed."""
    profile = recording.profile
    for parts in written["device_parts"].values():
        assert list(parts) == list(PARTS)
        assert min(parts.values()) >= 0
        assert sum(parts.values()) == pytest.approx(profile.step_seconds, rel=1e-6)
    assert sum(row["seconds"] for row in written["operators"]) == pytest.approx(profile.parts["computing"], rel=1e-6)
    told = [event.duration for event in recording.trace.events if event.kind == "step"]
    assert len(told) == STEPS
    assert profile.step_seconds == pytest.approx(sum(told) / STEPS / 1e9, rel=0.02)
    gains = [change["gain"] for change in written["changes"]]
    assert gains == sorted(gains, reverse=True)
    assert 0 < len(gains) <= 3
    assert gains[0] < profile.step_seconds


def check_pictures(folder, *names):
    for name in names:
        root = ElementTree.parse(folder / name).getroot()
        assert root.tag.endswith("svg")
        assert len(list(root.iter())) > 100


@pytest.mark.slow
def test_data_and_tensor_parallel(tmp_path, monkeypatch):
    texts = []
    account = profiling.account
    monkeypatch.setattr(
        profiling, "account", lambda e, programs, *r: texts.extend(programs) or account(e, programs, *r)
    )
    recording, written = record(tmp_path, "plan.dp=2", "plan.mp=2")
    check_sums(recording, written)
    profile = recording.profile
    assert profile.joined == 1
    # what ran is what the program says
    (program,) = texts
    expected = find_collectives(program.text, recording.config.parallel_plan.mesh)
    assert sum(c.wire for c in profile.collectives) == pytest.approx(sum(c.total_wire for c in expected))
    assert {c.axes for c in profile.collectives} == {c.axes for c in expected} >= {("dp",), ("mp",)}
    names = [f"cpu:{device.id}" for device in jax.devices()[:4]]
    along = {c.axes: c.groups for c in profile.collectives}
    assert along["dp",] == ((names[0], names[2]), (names[1], names[3]))
    assert along["mp",] == ((names[0], names[1]), (names[2], names[3]))
    # 2 FLOP a multiplication of 128 tokens by [32, 128], and a bias
    (up,) = [r for r in profile.rows if (r.layer, r.op, r.phase) == ("GPT.blocks.0.ffn.up", "linear", "forward")]
    assert 2 * 128 * 32 * 128 <= up.flop <= 1.1 * 2 * 128 * 32 * 128
    assert set(up.by_device) == set(names)
    assert written["memory"][names[0]]["optimizer"] == pytest.approx(
        2 * written["memory"][names[0]]["parameters"], rel=0.01
    )
    # the file reads back as the trace
    events = load_profiler_result(tmp_path / "profile" / TRACE).events
    assert [event.name for event in events] == [event.name for event in recording.trace.events]
    check_pictures(tmp_path / "profile", profile_drawing.COMMUNICATION, profile_drawing.PLACEMENT)
    assert not (tmp_path / "profile" / profile_drawing.TIMELINE).exists()
    assert "GPT.blocks.0.ffn.up" in (tmp_path / "profile" / profile_report.TEXT).read_text()


@pytest.mark.slow
def test_pipeline_stages(tmp_path):
    recording, written = record(tmp_path, "plan.pp=2", "plan.dp=2", "train.accumulation=4")
    check_sums(recording, written)
    profile = recording.profile
    assert profile.joined > 0.8
    schedule = recording.config.parallel_plan.make_schedule(4)
    for stage in range(2):
        measured = [
            (b.kind, b.microbatch, b.chunk) for b in sorted(profile.tasks, key=lambda b: b.start) if b.stage == stage
        ]
        assert measured == [tuple(task) for task in schedule.tables[stage]]
    sent = {(send.source, send.what): send for send in recording.sends}
    assert sent[0, "activations"].times == sent[1, "gradients"].times == 4
    assert sent[0, "activations"].nbytes == 4 * 1 * 16 * 32  # a row of 16 tokens for each replica
    places = {d for row in profile.rows if row.layer.startswith("PipelineChunk.1.block.ffn") for d in row.by_device}
    assert len(places) == 2
    check_pictures(tmp_path / "profile", profile_drawing.COMMUNICATION, profile_drawing.TIMELINE)
    # the plan's tasks, as long as they were measured, wait for nothing but each other
    planned = planned_tasks(profile)
    assert len(planned) == len(profile.tasks) == 16
    total = sum(task.end - task.start for task in profile.tasks)
    assert sum(task.end - task.start for task in planned) == pytest.approx(total)
    ends = [max(task.end for task in each) for each in (planned_tasks(profile, finer=2), planned, profile.tasks)]
    assert ends[0] < ends[1]
    # of two stages the mean of four tasks a kind may be planned longer than it was measured, not by much
    assert ends[1] < 1.5 * ends[2]


def test_frozen_parameters_lie_on_the_devices_too():
    layer = nn.Linear(4, 8)
    mesh = SimpleNamespace(devices=np.array(jax.devices()[:1]))
    trainer = SimpleNamespace(
        layout=SimpleNamespace(mesh=mesh), model=layer, arrays=lambda: {"model/bias": layer.bias._array}
    )
    assert profiling._memory(trainer, [])["cpu:0"] == {"parameters": 4 * (4 * 8 + 8), "optimizer": 0, "workspace": 0}


def test_a_trace_that_is_too_large_loses_the_shortest_runtime_events(tmp_path):
    events = [TraceEvent("step", "step", 0, 1, "a")]
    events += [TraceEvent(f"runtime {i}", "runtime", i, 2 + i, "a") for i in range(400)]
    events += [TraceEvent(f"kernel {i}", "kernel", i, 1, "b", "cpu:0") for i in range(40)]
    path = tmp_path / "trace.json"
    assert write_within(events, path, 10**6) == 0
    left_out = write_within(events, path, 20_000)
    assert path.stat().st_size <= 20_000
    kept = read_chrome(path)
    assert len(kept) == len(events) - left_out
    assert [e.kind for e in kept if e.kind != "runtime"] == ["step"] + ["kernel"] * 40
    durations = [e.duration for e in kept if e.kind == "runtime"]
    assert durations == [402 - i for i in range(len(durations), 0, -1)]


@pytest.mark.parametrize(
    ("overrides", "steps", "told"),
    [((), 0, "--steps 0"), (("plan.offload={param: host}",), 1, "offload of param")],
    ids=["no steps", "streamed parameters"],
)
def test_what_cannot_be_recorded_is_refused(tmp_path, overrides, steps, told):
    (tmp_path / "run.yaml").write_text(CONFIG)
    config = config_file.load(tmp_path / "run.yaml", overrides).config
    with pytest.raises(ConfigError, match=told):
        profiling.record(config, tmp_path, steps)


def test_stages_over_processes_are_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    (tmp_path / "run.yaml").write_text(CONFIG)
    config = config_file.load(tmp_path / "run.yaml", ["plan.pp=2"]).config
    with pytest.raises(ConfigError, match=r"plan.pp=2 over 2 processes: stages are recorded in one process alone"):
        profiling.record(config, tmp_path, 1)


@pytest.mark.slow
@pytest.mark.process
def test_ranks_are_in_one_trace(tmp_path):
    """Two processes of two devices each, profiled and trained; the config asks for a recording of steps 3 and 4."""
    (tmp_path / "run.yaml").write_text(CONFIG + "profile: {steps: 2, start: 3}\noutput: run\n")
    start = [sys.executable, "-m", "polyreme.cli.main", "launch", "--nproc_per_node", "2"]
    plan = ["plan.dp=2", "plan.mp=2", "train.steps=6", "log.validation_interval=0", "log.sample_tokens=0"]
    told = os.environ | {"CPU_NUM": "2", "POLYREME_INIT_TIMEOUT": "60"}
    for command in (["profile", "run.yaml", *plan, "--output", "profile"], ["pretrain", "run.yaml", *plan]):
        done = subprocess.run([*start, *command], cwd=tmp_path, env=told, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "profile" / profile_report.SUMMARY).read_text())
    assert len(summary["device_parts"]) == len(summary["memory"]) == 4
    assert {round(row["runs"]) for row in summary["collectives"]} <= {1, 2, 3}
    assert summary["placement"]["programs"] == [{"stage": 0, "program": "step", "runs": 1}]
    for parts in summary["device_parts"].values():
        assert sum(parts.values()) == pytest.approx(summary["step_seconds"], rel=1e-6)
    for folder in ("profile", "run/profile"):
        events = load_profiler_result(tmp_path / folder / TRACE).events
        assert {event.rank for event in events} == {0, 1}
        assert {event.device for event in events} - {""} == set(summary["memory"])
        # ranks leave a collective together, on a clock that is theirs in common: within what a busy machine makes of it
        ends = {}
        for event in (e for e in events if e.kind == "kernel" and e.name.startswith("all-reduce")):
            ends.setdefault((event.name, event.args["run"]), []).append(event.end)
        spread = sorted(max(each) - min(each) for each in ends.values())
        assert spread[len(spread) // 2] < 50e6
