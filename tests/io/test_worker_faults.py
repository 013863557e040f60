"""Workers that raise, die or hang, parents that die, memory that runs out: named and bounded in time."""

import gc
import os
import re
import subprocess
import sys
import textwrap
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from polyreme import io
from polyreme.errors import ConfigError, DataError
from polyreme.io import shared
from polyreme.io.failure import WorkerTraceback
from tests.io import sources

ROOT = str(Path(__file__).parents[2])
BOUND = 5.0  # seconds in which a fault must be reported


def segments(pid=None):
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"polyreme{pid or os.getpid()}p")]


@pytest.fixture(autouse=True, scope="module")
def only_what_these_tests_leave_is_collected():
    """To walk through all that a long run has left takes a third of a second, after each test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_segments_left():
    before = set(segments())  # of a test that failed, whose traceback keeps its loader
    yield
    gc.collect()
    assert set(segments()) <= before


def failure_of(dataset, **settings):
    start = time.monotonic()
    with pytest.raises(DataError) as caught:
        list(io.DataLoader(dataset, **{"batch_size": 2, "num_workers": 2, **settings}))
    assert time.monotonic() - start < BOUND + settings.get("timeout", 0)
    return caught.value


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_carries_worker_sample_and_traceback(workers):
    error = failure_of(sources.Faulty(20, 13, "raises"), num_workers=workers)
    assert "failed reading sample 13 (batch of samples 12, 13): KeyError: 'no such file'" in str(error)
    assert isinstance(error.__cause__, KeyError)
    if workers:
        assert re.search(r"DataLoader worker [01] \(pid \d+\)", str(error))  # whichever was free
        assert isinstance(error.__cause__.__cause__, WorkerTraceback)
        assert 'raise KeyError("no such file")' in str(error.__cause__.__cause__)


def test_an_exception_that_cannot_be_made_again_comes_as_text():
    error = failure_of(sources.Faulty(20, 3, "raises_own"))
    assert "OwnError: own trouble" in str(error)
    assert isinstance(error.__cause__, WorkerTraceback)
    assert "in raises_own" in str(error.__cause__)


@pytest.mark.parametrize(
    ("how", "what"), [("is_killed", r"was killed by signal 9 \(SIGKILL\)"), ("leaves", "exited with code 3")]
)
def test_a_dead_worker_is_named_with_its_sample(how, what):
    error = failure_of(sources.Faulty(40, 14, how))
    assert re.search(rf"worker \d \(pid \d+\) {what} while reading", str(error))
    assert "reading sample 14 (batch of samples 14, 15)" in str(error)


def test_a_hung_worker_is_named_after_the_timeout():
    error = failure_of(sources.Faulty(40, 5, "hangs"), timeout=1)
    assert "worker 0" in str(error)
    assert "no batch within the timeout of 1 s while reading sample 5 (batch of samples 4, 5)" in str(error)


def test_a_worker_that_reads_nothing_is_hung_and_a_slow_one_is_not(monkeypatch):
    monkeypatch.setenv("POLYREME_LOADER_STALL", "0.6")
    # eight samples of 0.1 s: the batch takes longer than the limit, none of its samples does
    monkeypatch.setenv("FAULTS", "data.worker:delay=0.1")
    assert len(list(io.DataLoader(sources.Rows(8), batch_size=8, num_workers=1))) == 1
    monkeypatch.setenv("FAULTS", "data.worker:hang@2")
    error = failure_of(sources.Rows(8), num_workers=1)
    assert "has read no sample for 0.6 s (POLYREME_LOADER_STALL) while reading sample 2" in str(error)


def test_no_shared_memory_is_said(monkeypatch):
    def refuse(*_, **__):
        raise OSError(30, "Read-only file system", "/polyreme1")

    monkeypatch.setattr(shared.shared_memory, "SharedMemory", refuse)
    with pytest.raises(
        DataError, match=r"cannot be made in /dev/shm \(Read-only file system\).*use_shared_memory=False"
    ):
        shared.create("polyreme1", 10)


@pytest.mark.slow_cases("hang-timeout of 2 s while reading")
@pytest.mark.parametrize(
    ("action", "what"),
    [
        ("raise", "failed reading sample 17"),
        ("kill", "was killed by signal 9"),
        ("hang", "timeout of 2 s while reading"),
    ],
)
def test_the_injection_point_of_the_workers(monkeypatch, action, what):
    monkeypatch.setenv("FAULTS", f"data.worker:{action}@17")
    error = failure_of(sources.Rows(40), timeout=2)
    assert what in str(error)
    assert "sample 17" in str(error)


def test_failures_outside_the_samples():
    assert "calling worker_init_fn(0): OSError: no device" in str(
        failure_of(sources.Rows(4), worker_init_fn=sources.init_fails, num_workers=1)
    )
    assert "unpacking the dataset: RuntimeError: the database is closed" in str(failure_of(sources.Unloadable(4)))
    ragged = str(failure_of(sources.Ragged(4)))
    assert "collating samples 0, 1: ShapeError" in ragged
    assert "(1,) in sample 0 but (2,) in sample 1" in ragged
    assert "failed sending its batch" in str(failure_of(sources.Rows(4), collate_fn=sources.lambda_collate))
    assert "reading 2 samples of the stream: ValueError: bad line" in str(failure_of(sources.Count(9, at=4)))
    assert "within" not in ragged


def test_the_batches_before_the_failure_are_delivered():
    running = iter(io.DataLoader(sources.Faulty(20, 9, "raises"), num_workers=2))
    assert [int(next(running)[0]) for _ in range(9)] == list(range(9))
    with pytest.raises(DataError, match="sample 9 "):
        next(running)


def test_a_persistent_loader_works_again_after_a_failure():
    loader = io.DataLoader(sources.Faulty(6, 5, "is_killed"), num_workers=2, persistent_workers=True)
    for _ in range(2):
        with pytest.raises(DataError, match="SIGKILL"):
            list(loader)


def test_leaving_early_stops_the_workers():
    start = time.monotonic()
    loader = io.DataLoader(sources.Faulty(50, 30, "hangs"), num_workers=2)
    pids = {int(pid) for _, pid in [next(iter(io.DataLoader(sources.Modules(1), num_workers=1)))]}
    next(iter(loader))
    del loader
    gc.collect()
    assert time.monotonic() - start < BOUND
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_prefetch_factor_bounds_what_is_read_ahead(tmp_path):
    dataset = sources.Logged(40, tmp_path / "log")
    loader = io.DataLoader(dataset, num_workers=2, prefetch_factor=3, use_buffer_reader=False)
    running = iter(loader)
    for delivered in range(1, 4):
        next(running)
        in_flight = 3 * 2  # batches for each worker
        deadline = time.monotonic() + BOUND
        while dataset.count() < delivered + in_flight and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)  # what is read beyond the bound is read at once
        assert dataset.count() == delivered + in_flight


def test_the_parent_killed_leaves_no_worker_and_no_memory(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys, time
            sys.path.insert(0, {ROOT!r})
            import numpy as np
            from tests.io import sources
            from polyreme.io.collate import default_collate_fn
            from polyreme.io.fetch import LeftOut
            from polyreme.io.pool import PoolOptions, WorkerPool
            from polyreme.io.worker import BatchRequest

            options = PoolOptions(2, 2, True, 0, 0, False, False)
            pool = WorkerPool(sources.Modules(100), default_collate_fn, None, options, LeftOut(0))
            pool.begin(0, iter([BatchRequest(i, [i]) for i in range(90)] ))
            pids = {{pool.take(lambda batch: int(batch[1][0])) for _ in range(4)}}
            slow = WorkerPool(sources.Faulty(9, 0, "hangs"), default_collate_fn, None, options, LeftOut(0))
            slow.begin(0, iter([BatchRequest(0, [0])]))
            time.sleep(0.5)
            print(*pids, *[w.process.pid for w in slow._workers], flush=True)
            time.sleep(60)
            """
        )
    )
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 4
    assert segments(parent.pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (segments(parent.pid) or any(os.path.exists(f"/proc/{p}") for p in pids)):
        time.sleep(0.1)
    assert segments(parent.pid) == []
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_too_little_shared_memory_is_refused_with_the_bytes(monkeypatch):
    Room = namedtuple("Room", "f_bavail f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda path: Room(10, 4096))
    slot = shared.Slot(f"polyreme{os.getpid()}ptest")
    with pytest.raises(DataError, match=r"needs 80000 bytes, /dev/shm has 40960 bytes free.*use_shared_memory=False"):
        slot.write([np.zeros(10000)])


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode != 0, reason="needs unshare"
)
def test_a_real_small_shared_memory_raises_instead_of_killing(tmp_path):
    script = tmp_path / "small.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {ROOT!r})\n"
        "from tests.io import sources\nfrom polyreme.io import DataLoader\n"
        "list(DataLoader(sources.Rows(4, width=300_000), batch_size=2, num_workers=1))\n"
    )
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    command = ["unshare", "-rm", "sh", "-c", f"{mount} && exec {sys.executable} {script}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "DataError: DataLoader worker 0" in run.stderr
    assert "shared memory is too small: a batch needs 2400064 bytes" in run.stderr


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_cannot_be_read_are_left_out_up_to_a_bound(workers, caplog):
    settings = {"batch_size": 2, "num_workers": workers, "persistent_workers": workers > 0}
    loader = io.DataLoader(sources.Faulty(8, 3, "raises"), skip_bad=1, **settings)
    for _ in range(2):  # counted in each pass
        assert [ids.numpy().ravel().tolist() for ids, _ in loader] == [[0, 1], [2], [4, 5], [6, 7]]
    assert "sample 3 left out, 1 of at most 1: KeyError: 'no such file'" in caplog.text
    loader = io.DataLoader(sources.AllBad(4), skip_bad=2, **settings)
    with pytest.raises(
        DataError, match=r"sample 2 cannot be read: OSError: bad 2; 3 of this pass cannot, and skip_bad=2"
    ):
        list(loader)
    with pytest.raises(DataError, match="make no batch"):
        list(io.DataLoader(sources.AllBad(4), skip_bad=4, **settings))
    with pytest.raises(ConfigError, match="skip_bad=1 needs samples with an index"):
        io.DataLoader(sources.Count(4), skip_bad=1)
