"""Traces of ranks as one: clocks, names of devices, numbers of programs, and the file for Perfetto."""

import gzip
import json
import threading
from queue import Queue

import pytest

from polyreme.distributed.job import clocks
from polyreme.distributed.job.rendezvous import free_port
from polyreme.errors import ConfigError, DataError
from polyreme.profiler.merge import MARK, RankTrace, merge
from polyreme.profiler.trace import TraceEvent, read_chrome, write_chrome


def rank_trace(rank, mark, clock, offset, program):
    """A rank whose kernel begins 50 ns after its mark."""
    events = [
        TraceEvent(MARK, "user", mark, 5, "python"),
        TraceEvent("all-reduce", "kernel", mark + 50, 10, "pool", "cpu:0", "jit_step", {"program": program, "run": 3}),
        TraceEvent("all-reduce", "kernel", mark + 90, 10, "pool", "cpu:0", "jit_step", {"program": program, "run": 8}),
    ]
    return RankTrace(rank, events, clock, offset, {"cpu:0": f"cpu:{rank}"})


def test_events_of_ranks_come_on_one_clock(tmp_path):
    """Rank 1's clock is 700 ahead; its mark was 20 ns after rank 0's."""
    traces = [rank_trace(0, 1000, 5000, 0, 11), rank_trace(1, 10, 5720, 700, 42)]
    assert RankTrace.unpacked(traces[1].packed()) == traces[1]
    events = merge(traces)
    assert [(e.rank, e.name, e.begin) for e in events] == [
        (0, MARK, 0),
        (1, MARK, 20),
        (0, "all-reduce", 50),
        (1, "all-reduce", 70),
        (0, "all-reduce", 90),
        (1, "all-reduce", 110),
    ]
    kernels = [e for e in events if e.kind == "kernel"]
    assert [e.device for e in kernels] == ["cpu:0", "cpu:1"] * 2
    assert [e.args for e in kernels] == [{"program": 0, "run": run} for run in (0, 0, 1, 1)]
    path = tmp_path / "trace.json.gz"
    write_chrome(events, path)
    assert read_chrome(path) == events
    rows = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert [row["args"]["name"] for row in rows if row["name"] == "process_name"] == ["rank 0", "rank 1"]
    assert len({row["pid"] for row in rows}) == 2


def test_a_trace_without_a_mark_is_refused():
    trace = RankTrace(1, [TraceEvent("a", "user", 0, 1, "python")], 0, 0, {})
    with pytest.raises(DataError, match="trace of rank 1 has no event"):
        merge([trace])


def test_a_rank_whose_clock_nobody_asks_says_so(monkeypatch):
    monkeypatch.setenv("POLYREME_INIT_TIMEOUT", "1")
    port = free_port("127.0.0.1")
    with pytest.raises(ConfigError, match=f"rank 0's clock at 127.0.0.1:{port} does not answer rank 1"):
        clocks.measure(1, 2, "127.0.0.1", lambda value: f"127.0.0.1:{port}")
    with pytest.raises(ConfigError, match="a rank did not come to compare its clock"):
        clocks.measure(0, 2, "127.0.0.1", str)


def test_clocks_are_compared_to_what_they_are_apart(monkeypatch):
    """Three ranks as threads, each with a clock of its own."""
    ahead = {"rank 0": 0, "rank 1": 10**9, "rank 2": -(10**12)}
    real = clocks.time.monotonic_ns
    monkeypatch.setattr(
        clocks, "time", type("Time", (), {"monotonic_ns": lambda: real() + ahead[threading.current_thread().name]})
    )
    addresses, offsets = Queue(), {}

    def share(value):
        if value is None:
            return addresses.get(timeout=20)
        for _ in range(2):
            addresses.put(value)
        return value

    def measure(rank):
        offsets[rank] = clocks.measure(rank, 3, "127.0.0.1", share)

    threads = [threading.Thread(target=measure, args=(rank,), name=f"rank {rank}") for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert offsets[0] == (0, 0)
    for rank in (1, 2):
        assert abs(offsets[rank].ahead - ahead[f"rank {rank}"]) <= offsets[rank].error
        assert 0 < offsets[rank].error < 10**9
