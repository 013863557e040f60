"""The device kit: what it makes of rows that fail, crash and hang, and what its rows and checks say of the CPU."""

import json
import sys

import numpy as np
import pytest

from polyreme.conformance import arithmetic, checks, compiling, kit, worker
from polyreme.conformance.case import Case, NothingRaised, assert_close, check_bad, tolerance
from polyreme.conformance.rows import ROWS
from polyreme.core.devices.place import CPUPlace
from polyreme.core.engine import plugins
from polyreme.errors import ConfigError, DeviceError

FACTS = {"device": "x:0", "kind": "X1", "platform": "x", "platform_version": "1", "devices": 1, "factor_bits": 24,
         "jax": "0", "python": "3"}  # fmt: skip
SCRIPT = f"""
import json, os, sys, time
if sys.argv[1] == "absent": sys.exit("no such device")
if "HELLO" in sys.argv: print('{json.dumps(FACTS)}', flush=True)
for line in sys.stdin:
    name = line.strip()
    if name == "matmul": sys.stderr.write("bad instruction\\n"); sys.stderr.flush(); os.abort()
    if name == "tanh": time.sleep(60)
    status = "failed" if name == "exp" else "passed"
    print(json.dumps({{"name": name, "status": status, "seconds": 0.1, "detail": "off|by one" * (status == "failed")}}),
          flush=True)
"""


@pytest.fixture
def fake(monkeypatch):
    """Workers that know no jax."""
    monkeypatch.setattr(kit, "WORKER", (sys.executable, "-c", SCRIPT))
    monkeypatch.setattr(kit, "START_SECONDS", 2.0)


@pytest.mark.process
def test_a_row_that_ends_its_process_fails_alone(fake, monkeypatch):
    monkeypatch.setattr(kit, "names", lambda _: ["add", "matmul", "exp", "tanh", "checkpoints_move", "sin"])
    seen = []
    report = kit.run("x:0", kit.KitOptions(row_seconds=0.5), seen.append)
    assert [o.status for o in report.outcomes] == ["passed", "crashed", "failed", "timed out", "passed", "passed"]
    assert len(seen) == 6
    assert "signal 6: bad instruction" in report.outcomes[1].detail
    assert not report.is_conforming
    page = report.page()
    assert page.startswith("# X1 (x:0): does not conform")
    assert "| exp | failed | off/by one |" in page
    assert "| checkpoints move | passed |" in page
    assert json.loads(json.dumps(report.to_dict()))["rows"]["passed"] == ["add", "sin"]


@pytest.mark.process
def test_time_bounds_what_is_begun_and_a_device_that_is_not_there_is_told(fake):
    report = kit.run("x:0", kit.KitOptions(pattern="add*", seconds=1e-9))
    assert set(report.counts()) == {"not run"}
    assert not report.is_conforming
    with pytest.raises(DeviceError, match="no process starts on absent: no such device"):
        kit.run("absent")


def test_names_are_chosen_by_pattern_and_drawn_by_seed():
    assert kit.names(kit.KitOptions("checkpoints*")) == ["checkpoints_move"]
    drawn = kit.names(kit.KitOptions(sample=5, seed=1))
    assert drawn[: len(checks.CHECKS)] == list(checks.CHECKS)
    assert len(drawn) == len(checks.CHECKS) + 5
    assert drawn == kit.names(kit.KitOptions(sample=5, seed=1)) != kit.names(kit.KitOptions(sample=5, seed=2))
    with pytest.raises(ConfigError, match="no row or check is called 'nothing'"):
        kit.names(kit.KitOptions("nothing"))


def test_tolerance_follows_what_factors_are_rounded_to():
    by_name = {case.id: case for case in ROWS}
    product = arithmetic.for_device(by_name["matmul"], 11)
    assert product.factor_eps == 2.0**-10
    assert arithmetic.for_device(by_name["matmul"], 24).factor_eps == 0
    assert arithmetic.for_device(by_name["tanh"], 8).factor_eps == 0
    assert tolerance(np.dtype("float32"), 2, 2.0**-10) == 8 * 2.0**-10
    assert tolerance(np.dtype("float64"), 2, 2.0**-10) == tolerance(np.dtype("float64"), 2)
    rounded = [np.float32([1.0 + 2.0**-11])]
    assert_close(rounded, [np.ones(1)], 1, 2.0**-10)
    with pytest.raises(AssertionError):
        assert_close(rounded, [np.ones(1)], 1)


def test_a_plugin_declares_its_own_arithmetic(monkeypatch):
    monkeypatch.setitem(plugins._plugins, "npu", plugins.Plugin("npu", "/npu.so", factor_bits=8))
    assert [arithmetic.factor_bits(name) for name in ("npu", "cpu", "gpu", "other")] == [8, 24, 11, 24]


def test_a_row_that_is_wrong_is_told(monkeypatch):
    def off(x):
        return np.tanh(x) + 1e-3

    row = next(case for case in ROWS if case.id == "tanh")
    wrong = Case(row.name, row.make, off, no_grad="for this test", tag="off")
    monkeypatch.setitem(worker._ROWS, "tanh-off", wrong)
    answer = worker.outcome("tanh-off", CPUPlace())
    assert answer["status"] == "failed"
    assert "AssertionError: Not equal to tolerance" in answer["detail"]
    assert "case.py" in answer["detail"]
    fearless = Case(row.name, row.make, np.tanh, bad=((np.ones(2, "float32"),), ValueError, "two"))
    with pytest.raises(NothingRaised, match="no ValueError of bad input"):
        check_bad(fearless)


QUICK = ("arrays_keep_their_bits", "products_are_as_declared", "memory_kinds_hold_arrays", "donated_arrays_are_gone",
         "draws_are_those_of_the_processor", "checkpoints_move", "collectives_sum_and_exchange")  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in checks.CHECKS])
def test_the_processor_passes_every_check(name):
    answer = worker.outcome(name, CPUPlace())
    assert answer["status"] == "passed", answer["detail"]


def test_rows_are_lowered_for_a_gpu_that_is_not_here():
    by_name = {case.id: case for case in ROWS}
    target = compiling.Target.named("cuda")
    for name in ("matmul", "argmax"):  # with a gradient and without
        assert compiling.outcome(by_name[name], target)["status"] == "passed"
    on_host = next(case for case in ROWS if case.host)
    assert compiling.outcome(on_host, target)["status"] == "skipped"
    absent = compiling.outcome(by_name["eigvals"], target)
    assert absent["status"] == "failed"
    assert "custom calls" in absent["detail"]
    facts = target.describe()
    assert (facts["device"], facts["platform"], facts["factor_bits"]) == ("cuda", "cuda", 11)
    with pytest.raises(ConfigError, match=r"libtpu|TPU slice"):
        compiling.Target.named("v5e:none")


@pytest.mark.process
def test_a_report_of_rows_that_were_compiled_says_so(fake):
    options = kit.KitOptions("sin", compiled=True)
    assert len(kit.names(kit.KitOptions(compiled=True, sample=3))) == 3
    report = kit.run("v5e:2x2", options)
    assert report.page().startswith("# X1 (x:0): compiles")
    assert "| check |" not in report.page()
