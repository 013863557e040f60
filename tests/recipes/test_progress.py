"""Rates, the progress line on a terminal and off it, and the peak the utilisation is measured against."""

import io
import os
import subprocess
import sys

import jax
import pytest

from polyreme.recipes.training.peak import bytes_in_use, find_peak
from polyreme.recipes.training.progress import Meter, ProgressDisplay, Reading, duration_text, resident_bytes


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def read(meter, step, **values):
    return meter.read(step, loss=2.0, learning_rate=1e-3, **values)


def test_first_reading_has_no_rate_so_that_compiling_never_counts(clock):
    meter = Meter(100, 1000, flops_per_token=6.0, peak_flops=12_000.0, clock=clock)
    clock.now += 50  # compiling
    first = read(meter, 1)
    assert (first.tokens_per_second, first.utilisation, first.eta_seconds) == (None, None, None)
    assert first.elapsed_seconds == 50
    clock.now += 10
    second = read(meter, 21)
    assert second.tokens_per_second == 2000  # 20 steps x 1000 tokens in 10 s
    assert second.utilisation == 1.0
    assert second.eta_seconds == 79 / 2


def test_pauses_are_left_out(clock):
    meter = Meter(100, 10, clock=clock)
    read(meter, 1)
    clock.now += 1
    with meter.paused():
        clock.now += 500
    clock.now += 1
    reading = read(meter, 3)
    assert reading.tokens_per_second == 10
    assert reading.elapsed_seconds == 502
    assert reading.utilisation is None


def test_rate_follows_the_last_reports(clock):
    meter = Meter(1000, 1, clock=clock)
    for step in range(1, 20):
        clock.now += 100
        read(meter, step)
    for step in range(20, 29):
        clock.now += 1
        last = read(meter, step)
    assert last.tokens_per_second == 1


def test_clock_that_stands_still_gives_no_rate(clock):
    meter = Meter(10, 1, clock=clock)
    read(meter, 1)
    assert read(meter, 2).tokens_per_second is None


def test_memory_is_the_callers_or_this_process(clock):
    meter = Meter(10, 1, clock=clock)
    assert read(meter, 1, memory_bytes=5).memory_bytes == 5
    assert read(meter, 2).memory_bytes > 10 << 20
    assert resident_bytes() > 10 << 20


READING = Reading(40, 3.25, 1e-3, 0.5, 12345.6, 0.41, 3 << 30, 75.0, 10.0)


@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1", "TERM": "xterm"}], ids=["pipe", "notebook"])
def test_plain_lines(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    out = io.StringIO()
    with ProgressDisplay(400, file=out) as progress:
        progress.show(READING)
        progress.note("saved step 40")
        progress.show(Reading(41, 3.0, 1e-3, None, None, None, 1 << 20, None, 11.0))
    assert out.getvalue() == (
        "step  40/400 | loss 3.2500 | lr 1.00e-03 | grad-norm 0.500 | tok/s 12,346 | utilisation 41.0% | "
        "mem 3.0 GiB | ETA 1m15s\n"
        "saved step 40\n"
        "step  41/400 | loss 3.0000 | lr 1.00e-03 | tok/s - | mem 1.0 MiB | ETA -\n"
    )


def test_terminal_gets_a_live_line(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    with ProgressDisplay(400, label="MFU", file=out) as progress:
        progress.show(READING)
        progress.note("[saved] step 40")
    text = out.getvalue()
    assert "\x1b[" in text  # drawn in place
    assert "step  40/400" in text
    assert "MFU 41.0%" in text
    assert "[saved] step 40" in text  # square brackets are not markup


def test_run_outlives_the_reader_of_its_lines():
    code = (
        "import sys; from polyreme.recipes.training.progress import ProgressDisplay\n"
        "with ProgressDisplay(9) as p:\n"
        "    for i in range(20000): p.note('line')\n"
        "sys.stderr.write('trained to the end')"
    )
    command = f'"{sys.executable}" -c "{code}" | head -1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "line\n", "trained to the end")


def test_durations_as_text():
    assert [duration_text(s) for s in (-1, 59.6, 3599, 3600)] == ["0s", "1m00s", "59m59s", "1h00m"]


def test_peak_of_the_cpu_is_measured_once_for_all_virtual_devices():
    devices = jax.devices("cpu")
    peak = find_peak(devices, "float32")
    assert peak.label == "utilisation"
    # one core does at least a GFLOP/s; no machine's CPU reaches 1 PFLOP/s
    assert 1e9 < peak.flops_per_second < 1e15
    assert find_peak(devices, "float32") == peak  # no two measurements agree to the last bit


def test_peak_from_the_data_sheet():
    class Device:
        platform, device_kind = "gpu", "NVIDIA H200"

    peak = find_peak([Device(), Device()], "bfloat16")
    assert (peak.label, peak.flops_per_second) == ("MFU", 2 * 989e12)


def test_memory_of_devices():
    class Device:
        def __init__(self, stats):
            self.memory_stats = lambda: stats

    assert bytes_in_use([Device({"bytes_in_use": 3}), Device({"bytes_in_use": 7})]) == 7
    assert bytes_in_use(jax.devices("cpu")) == 0


def test_output_stays_in_the_process(tmp_path):
    """Progress writes to the file it was given, not to the standard output."""
    with (tmp_path / "out").open("w") as file, ProgressDisplay(1, file=file) as progress:
        progress.note("x")
    assert os.path.getsize(tmp_path / "out") == 2
