"""polyreme.profiler: which steps are recorded, what a trace tells, files and tables, bad calls."""

import json

import numpy as np
import pytest

import polyreme as paddle
from polyreme.errors import ConfigError, DataError
from polyreme.profiler import (
    Profiler,
    ProfilerState,
    ProfilerTarget,
    RecordEvent,
    SortedKeys,
    SummaryView,
    export_chrome_tracing,
    export_protobuf,
    load_profiler_result,
    make_scheduler,
    summary,
)
from polyreme.profiler.trace import TraceEvent


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(a Profiler that recorded steps 1 and 2 of 4, the folder of what it wrote, how often it was told)."""
    folder, told = tmp_path_factory.mktemp("profile"), []
    write = export_chrome_tracing(str(folder), "worker")
    x = paddle.ones([64, 64])

    @paddle.jit.to_static
    def captured_product(x):
        return (x @ x).tanh()

    def ready(profiler):
        told.append(profiler.step_num)
        write(profiler)

    with Profiler(targets=[ProfilerTarget.CPU], scheduler=(1, 3), on_trace_ready=ready) as profiler:
        for _ in range(4):
            with RecordEvent("products"):
                float((x @ x).sum())
            RecordEvent("captured")(lambda: float(captured_product(x).max()))()
            profiler.step(num_samples=64)
    return profiler, folder, told


def test_the_steps_of_the_schedule_are_recorded_and_told_once(recorded):
    profiler, folder, told = recorded
    steps = [event.name for event in profiler.result.events if event.kind == "step"]
    assert steps == ["ProfileStep#1", "ProfileStep#2"]
    assert told == [3]
    (path,) = folder.iterdir()
    assert path.name.startswith("worker_time_")
    assert path.name.endswith(".paddle_trace.json")


def test_a_trace_tells_ops_captured_functions_and_names(recorded):
    events = recorded[0].result.events
    named = [event for event in events if event.kind == "user"]
    assert [event.name for event in named] == ["products", "captured"] * 2
    rows = {row.name: row for row in summary.operator_rows(events)}
    assert len(rows["matmul"].host.durations) == 2
    assert len(rows["captured_product"].host.durations) == 2
    for name in ("matmul", "sum", "captured_product"):
        assert rows[name].device.total > 0, name
    for event in named:  # what is called inside a block is within it
        calls = [e for e in events if e.kind == "operator" and event.begin <= e.begin < event.end]
        assert {e.name for e in calls} >= ({"matmul", "sum"} if event.name == "products" else {"captured_product"})


def test_files_give_the_same_events(recorded, tmp_path):
    profiler, folder, _ = recorded
    profiler.export(str(tmp_path / "a.pb"), "pb")
    profiler.export(str(tmp_path / "a.json.gz"))
    for path in (*folder.iterdir(), tmp_path / "a.pb", tmp_path / "a.json.gz"):
        events = load_profiler_result(path).events
        assert [(e.name, e.kind, e.thread, e.module) for e in events] == [
            (e.name, e.kind, e.thread, e.module) for e in profiler.result.events
        ]
        np.testing.assert_allclose([e.duration for e in events], [e.duration for e in profiler.result.events])
    rows = json.loads(next(folder.iterdir()).read_text())["traceEvents"]
    assert all(row["dur"] > 0 for row in rows if row["ph"] == "X")


def test_tables(recorded, capsys):
    recorded[0].summary(sorted_by=SortedKeys.GPUTotal, time_unit="us", thread_sep=True)
    text = capsys.readouterr().out
    for words in ("Devices", "Overview", "ProfileStep#1", "captured_product", "Kernels", "Named by RecordEvent"):
        assert words in text, words
    recorded[0].summary(views=SummaryView.UDFView)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Named by RecordEvent"
    assert sorted(line.split()[:2] for line in lines[3:]) == [["captured", "2"], ["products", "2"]]
    recorded[0].summary(views=[SummaryView.MemoryView])
    assert "Memory, MiB" in capsys.readouterr().out


def test_what_collectives_take_alone():
    events = [TraceEvent("dot", "kernel", 0, 4, "a"), TraceEvent("all-reduce.1", "kernel", 3, 4, "b")]
    text = summary.text_of(events, time_unit="ns", views=SummaryView.DistributedView)
    assert text.endswith("3.000 of 4.000 ns with no computation beside them")


def test_a_timer_alone(capsys):
    loader = paddle.io.DataLoader(paddle.io.TensorDataset([paddle.arange(6.0)]), batch_size=2)
    timer = Profiler(timer_only=True)
    timer.start()
    for _ in loader:
        timer.step(num_samples=2)
    timer.stop()
    text = timer.step_info(unit="rows")
    assert text.startswith("reader_cost: ")
    assert text.endswith(" rows/s")
    assert timer.step_info() == ""
    timer.summary()
    assert "samples/s" in capsys.readouterr().out


def test_schedules():
    states = [make_scheduler(closed=1, ready=0, record=2)(step) for step in range(4)]
    recording = [ProfilerState.RECORD, ProfilerState.RECORD_AND_RETURN]
    assert states == [ProfilerState.CLOSED, *recording, ProfilerState.CLOSED]
    with pytest.raises(ConfigError, match=r"closed=-1, ready=0, record=2, .*; give at least 1 step to record"):
        make_scheduler(closed=-1, ready=0, record=2)
    with pytest.raises(ConfigError, match=r"scheduler \(3, 3\); give \(first, end\) with 0 <= first < end"):
        Profiler(scheduler=(3, 3))


def test_calls_out_of_order_and_settings_that_do_nothing(tmp_path):
    with pytest.raises(ConfigError, match=r"with_flops=True, which jax's trace does not have"):
        Profiler(with_flops=True)
    with pytest.raises(ConfigError, match=r"ProfilerTarget\.GPU and devices of cpu; leave targets out"):
        Profiler(targets=[ProfilerTarget.GPU])
    with pytest.raises(ConfigError, match=r"Profiler\.step: it has not started"):
        Profiler().step()
    with pytest.raises(ConfigError, match="export: nothing was recorded yet"):
        Profiler(timer_only=True).export("a.json")
    with pytest.raises(ConfigError, match=r"RecordEvent\('a'\).end\(\) without begin"):
        RecordEvent("a").end()
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "a.pb").write_text("no")
    for name in ("a.json", "a.pb", "b.json"):
        with pytest.raises(DataError, match=r"not a trace|no such file"):
            load_profiler_result(tmp_path / name)


def test_two_profilers_at_once(tmp_path):
    with Profiler(on_trace_ready=export_protobuf(str(tmp_path))) as profiler:
        with pytest.raises(ConfigError, match=r"jax's profiler does not start .*; stop the one that records"):
            Profiler().start()
        profiler.step()
    assert load_profiler_result(next(tmp_path.iterdir())).events
