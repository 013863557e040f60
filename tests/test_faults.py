"""FAULTS: what is parsed, what fires and when."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polyreme.errors import ConfigError
from polyreme.faults import FaultInjected, point

ROOT = Path(__file__).parents[1]


def test_unset_does_nothing(monkeypatch):
    monkeypatch.delenv("FAULTS", raising=False)
    assert point("ckpt.rename") is None


def test_other_points_pass(monkeypatch):
    monkeypatch.setenv("FAULTS", "ckpt.rename:raise")
    point("ckpt.rename.before")
    with pytest.raises(FaultInjected, match=r"ckpt\.rename@1"):
        point("ckpt.rename")


def test_counts_passings_from_one(monkeypatch):
    monkeypatch.setenv("FAULTS", "a.counted:raise@3")
    point("a.counted")
    point("a.counted")
    with pytest.raises(FaultInjected, match=r"a\.counted@3"):
        point("a.counted")
    point("a.counted")


def test_index_is_what_n_means_when_given(monkeypatch):
    monkeypatch.setenv("FAULTS", "data.worker:raise@17")
    point("data.worker", index=3)
    for _ in range(2):  # the same sample fails each time it is met
        with pytest.raises(FaultInjected, match=r"data\.worker@17"):
            point("data.worker", index=17)


def test_raise_names_an_errno(monkeypatch):
    monkeypatch.setenv("FAULTS", "x:raise=ENOSPC")
    with pytest.raises(OSError, match="injected at x@1") as caught:
        point("x")
    assert caught.value.errno == errno.ENOSPC


def test_delay_is_in_seconds(monkeypatch):
    monkeypatch.setenv("FAULTS", "x:delay=0.05@1")
    start = time.monotonic()
    point("x")
    assert time.monotonic() - start >= 0.05


@pytest.mark.parametrize(
    "text", ["x", "x:explode", "x:kill@", "x:delay", "x:delay=soon", "x:raise=ENOSUCH", "x:kill=3", "x:kill,,"]
)
def test_a_bad_entry_is_refused(monkeypatch, text):
    monkeypatch.setenv("FAULTS", text)
    with pytest.raises(ConfigError, match="POINT:ACTION"):
        point("anything")


def _start(spec):
    code = "from polyreme.faults import point; print('before', flush=True); point('x'); print('after', flush=True)"
    env = {**os.environ, "FAULTS": spec}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)


def test_kill_ends_the_process_at_once():
    process = _start("x:kill@1")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert output == "before\n"


def test_hang_never_returns():
    process = _start("x:hang")
    try:
        assert process.stdout.readline() == "before\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.3)
    finally:
        process.kill()
        process.communicate()


def test_a_fault_may_be_kept_to_one_rank(monkeypatch):
    monkeypatch.setenv("FAULTS", "rank1:train.step:raise@7")
    monkeypatch.setenv("PADDLE_TRAINER_ID", "0")
    point("train.step", 7)
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    monkeypatch.setenv("FAULTS", "rank1:train.step:raise@7,other:raise")
    with pytest.raises(FaultInjected, match=r"train\.step@7"):
        point("train.step", 7)


def test_each_row_of_the_documented_faults_names_tests_that_exist():
    """docs/reliability.md: | row | fault | points | `file::test`<br>`::test of the same file` |"""
    page = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| (\d) \| ([^|]+) \|$", page, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == [*range(1, 49)]
    (points,) = re.findall(r"(\d+) in all", page)
    assert int(points) == sum(int(weight) for _, weight, _ in rows)
    for number, _, tests in rows:
        file = None
        for test in tests.split("<br>"):
            path, name = test.strip("`").split("::")
            file = ROOT / "tests" / path if path else file
            assert f"\ndef {name}(" in file.read_text(encoding="utf-8"), f"row {number}: {test}"
